//! Writes seed inputs made from captures, and those of RDMA/TCP and of a leg made by hand: `xwarp-fuzz-seeds DIRECTORY CAPTURE...` writes to
//! `DIRECTORY/TARGET/...`.

use std::{env, fs, io, path::PathBuf};

use xwarp_fuzz::seeds;

fn main() -> io::Result<()> {
    let mut arguments = env::args_os().skip(1).map(PathBuf::from);
    let Some(directory) = arguments.next() else {
        return Err(io::Error::other("usage: xwarp-fuzz-seeds DIRECTORY CAPTURE..."));
    };
    let write = |target: &str, name: &str, inputs: &[Vec<u8>]| {
        let directory = directory.join(target);
        fs::create_dir_all(&directory)?;
        for (number, input) in inputs.iter().enumerate() {
            fs::write(directory.join(format!("{name}-{number}")), input)?;
        }
        io::Result::Ok(())
    };
    write("segments", "by-hand", &seeds::of_segments())?;
    write("leg", "by-hand", &seeds::of_legs())?;
    for capture in arguments {
        let name = capture.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for (target, inputs) in seeds::of_capture(&capture)? {
            write(target, &name, &inputs)?;
        }
    }
    Ok(())
}
