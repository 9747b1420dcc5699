//! Observable devices and clients that behave badly.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs,
    io::Write as _,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    process,
    sync::{Mutex, PoisonError, mpsc::channel},
    thread,
    time::Duration,
};

use xwarp_verbs::{
    Device, DeviceOptions,
    observe::{directory, sockets},
    sim::{self, WireConfig},
};

/// Bytes of a line that is never finished, fewer than the observer reads, and the pause before each.
const BYTES: usize = 60;
const PAUSE: Duration = Duration::from_millis(500);

/// The tests look for sockets of this process, one test at a time.
static ONE: Mutex<()> = Mutex::new(());

fn observable() -> Device {
    let (interface, _other) = sim::pair(WireConfig::default(), 1500).unwrap();
    let options = DeviceOptions { observe: true, ..DeviceOptions::default() };
    Device::over(Box::new(interface), options).unwrap()
}

/// Each byte comes in time, the line does not: the device ends nevertheless, and hangs up.
#[test]
fn a_client_that_writes_slowly_does_not_hold_up_the_end_of_a_device() {
    // Without root, and without a session, no device is observable.
    let Some(directory) = directory() else { return };
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = observable();
    let own = format!("{}-", process::id());
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_own = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&own);
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

/// A process that is killed, or exits without closing its device, leaves a file.
#[test]
fn the_next_device_removes_the_sockets_of_ended_processes() {
    let Some(directory) = directory() else { return };
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = observable();
    let file = |pid: u32, number: &str| directory.join(format!("{pid}-left{number}-0"));
    // No process has the first ID; the second one belongs to a process that did not leave the file.
    let (unused, reused) = (u32::try_from(i32::MAX).unwrap(), process::id());
    let [ended, reused, young, waits] =
        [file(unused, ""), file(reused, "old"), file(reused, "young"), file(unused, "waits")];
    for path in [&ended, &reused, &young] {
        drop(UnixListener::bind(path).unwrap());
    }
    let old = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
    let times = rustix::fs::Timestamps { last_access: old, last_modification: old };
    rustix::fs::utimensat(rustix::fs::CWD, &reused, &times, rustix::fs::AtFlags::empty()).unwrap();
    // A process of another namespace, which accepts no connection at the moment.
    let _waits = UnixListener::bind(&waits).unwrap();
    let next = observable();
    assert_eq!([&ended, &reused, &young, &waits].map(|path| path.exists()), [false, false, true, true]);
    fs::remove_file(&young).unwrap();
    fs::remove_file(&waits).unwrap();
    let open = || {
        let found = sockets(&directory, rustix::process::geteuid().as_raw());
        found.iter().filter(|socket| socket.pid == process::id()).count()
    };
    let before = open();
    drop((device, next));
    assert_eq!(before - open(), 2);
}
