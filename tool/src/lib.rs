//! The parts of the `xwarp` command that other programs may use: so far [`explain`], which the fuzz targets run.
#![forbid(unsafe_code)]

pub mod explain;
