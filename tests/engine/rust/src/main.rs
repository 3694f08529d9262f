// A program in Rust against afflux.h: the inner products of two vectors.
use std::ffi::{c_char, c_int, c_void, CStr};

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    index: i32,
}

#[repr(C)]
struct View {
    data: *mut c_void,
    size: i64,
    device: Device,
    kind: i32,
    parts: *const c_void,
}

#[repr(C)]
struct Views {
    data: *const View,
    size: i64,
}

#[repr(C)]
struct Memory {
    data: *mut c_void,
    size: i64,
    device: Device,
}

extern "C" {
    fn afflux_abi() -> i32;
    fn afflux_gram(vectors: *const Views, out: *const Memory, num_threads: c_int) -> c_int;
    fn afflux_last_error() -> *const c_char;
}

const CPU: Device = Device { kind: 0, index: 0 };

fn view(vector: &mut [f32]) -> View {
    View { data: vector.as_mut_ptr().cast(), size: vector.len() as i64, device: CPU, kind: 0, parts: std::ptr::null() }
}

fn main() {
    let (mut first, mut second) = (vec![1.0f32; 5], vec![2.0f32; 5]);
    let views = [view(&mut first), view(&mut second)];
    let list = Views { data: views.as_ptr(), size: 2 };
    let mut products = [0.0f64; 4];
    let out = Memory { data: products.as_mut_ptr().cast(), size: 4, device: CPU };
    let too_short = Memory { data: out.data, size: 3, device: CPU };
    unsafe {
        assert_eq!(afflux_abi(), 1);
        assert_eq!(afflux_gram(&list, &out, 1), 0);
        println!("{:?}", products);
        println!("{}", afflux_gram(&list, &too_short, 1));
        println!("{}", CStr::from_ptr(afflux_last_error()).to_string_lossy());
    }
}
