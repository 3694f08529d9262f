"""The arrays that users pass: arrays of any library, trees of them, their layout, devices and pools of memory."""
