"""From NCHW to NHWC and back: csrc/layout/."""
