//! The parts of the `xwarp` command. The fuzz targets run [`explain`].
#![forbid(unsafe_code)]

#[cfg(feature = "af-xdp")]
pub mod device;
#[cfg(feature = "af-xdp")]
pub mod doctor;
pub mod explain;
#[cfg(feature = "af-xdp")]
pub mod fabric;
#[cfg(feature = "af-xdp")]
pub mod helper;
pub mod lab;
#[cfg(feature = "af-xdp")]
pub mod observed;
#[cfg(feature = "af-xdp")]
pub mod program;
#[cfg(feature = "af-xdp")]
pub mod run;
#[cfg(feature = "af-xdp")]
pub mod sdp;
#[cfg(feature = "af-xdp")]
pub mod stat;
#[cfg(feature = "af-xdp")]
mod sysfs;
