// AFFLUX is the folder of libafflux.so.
fn main() {
    let folder = std::env::var("AFFLUX").expect("AFFLUX is not set");
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib=afflux");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
}
