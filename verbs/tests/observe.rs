//! Observable devices and clients that behave badly.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs, io::Write as _, os::unix::net::UnixStream, process, sync::mpsc::channel, thread, time::Duration,
};

use xwarp_verbs::{
    Device, DeviceOptions,
    observe::directory,
    sim::{self, WireConfig},
};

/// Bytes of a line that is never finished, fewer than the observer reads, and the pause before each.
const BYTES: usize = 60;
const PAUSE: Duration = Duration::from_millis(500);

/// Each byte comes in time, the line does not: the device ends nevertheless, and hangs up.
#[test]
fn a_client_that_writes_slowly_does_not_hold_up_the_end_of_a_device() {
    // Without root, and without a session, no device is observable.
    let Some(directory) = directory() else { return };
    let (interface, _other) = sim::pair(WireConfig::default(), 1500).unwrap();
    let options = DeviceOptions { observe: true, ..DeviceOptions::default() };
    let device = Device::over(Box::new(interface), options).unwrap();
    let own = format!("{}-", process::id());
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_own = |path: &std::path::PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&own);
    let mut client = UnixStream::connect(paths.into_iter().find(is_own).unwrap()).unwrap();
    let (wrote, written) = channel();
    let writes = thread::spawn(move || {
        (0..BYTES).find(|number| {
            thread::sleep(PAUSE);
            let _ = wrote.send(*number);
            client.write_all(b"s").is_err()
        })
    });
    // After some bytes the observer reads the line.
    written.iter().find(|number| *number == 3).unwrap();
    drop(device);
    assert!(writes.join().unwrap().is_some(), "the device waited for {BYTES} bytes");
}
