//! `xwarp stat` and `xwarp capture` look at a running device from outside of its process: this test's own devices.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    fs,
    process::{Command, Output, id},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::Value;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
};
use xwarp_verbs::{
    Access, Device, DeviceOptions, Payload, QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
    observe::{DIRECTORY_OF_ROOT, DIRECTORY_VARIABLE},
};

const XWARP: &str = env!("CARGO_BIN_EXE_xwarp");
const LIMIT: Duration = Duration::from_secs(20);

/// The tests look for devices of this process, one test at a time.
static ONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(lab: &Lab, side: Side, observe: bool) -> Device {
    let options = DeviceOptions { observe, ..DeviceOptions::default() };
    lab.within(side, || Device::open_with(INTERFACE, options).unwrap()).unwrap()
}

fn xwarp(args: &[&str]) -> Output {
    Command::new(XWARP).args(args).env_remove(DIRECTORY_VARIABLE).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether `xwarp stat` sees a device of this process.
fn devices() -> Vec<Value> {
    let output = xwarp(&["stat", "--json", "--pid", &id().to_string()]);
    if !output.status.success() {
        return Vec::new();
    }
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["devices"].as_array().unwrap().clone()
}

#[test]
fn netns_stat_and_capture_see_a_running_device() {
    let _alone = alone();
    let lab = Lab::up(LabOptions::default()).unwrap();
    let (server, client) = (open(&lab, Side::B, false), open(&lab, Side::A, true));
    let found = devices();
    assert_eq!(found.len(), 1, "only the client is observable");
    assert_eq!((&found[0]["interface"], &found[0]["mtu"]), (&"xw0".into(), &1500.into()));
    assert_eq!(found[0]["queue_pairs"], Value::Array(Vec::new()));

    let file = lab.file("live.pcapng");
    let mut capture = Command::new(XWARP);
    capture.args(["capture", "--pid", &id().to_string(), "--write"]).arg(&file);
    let mut capture = Running::start(capture).unwrap();
    capture.wait_for("recording xw0 of process", LIMIT).unwrap();
    let until = std::time::Instant::now() + LIMIT;
    while fs::metadata(&file).map_or(0, |file| file.len()) == 0 {
        assert!(std::time::Instant::now() < until, "the capture does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    let refused = xwarp(&["capture", "--pid", &id().to_string(), "-w", "-"]);
    assert!(text(&refused.stderr).contains("another capture is running"), "{}", text(&refused.stderr));

    let address = (lab.address(Side::B, Family::V6), 4791).into();
    let listen = || server.listen(address, ListenOptions::default()).unwrap();
    let listener = lab.within(Side::B, listen).unwrap();
    let receiver = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let cq = server.create_cq(16).unwrap();
            let pd = server.create_pd().unwrap();
            let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
            let inbox = pd.allocate(100, Access::LOCAL_WRITE).unwrap();
            qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, 100)])).unwrap();
            let connection =
                listener.accept(LIMIT).unwrap().accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
            cq.spin(LIMIT).unwrap().check().unwrap();
            (connection, qp, inbox)
        });
        let cq = client.create_cq(16).unwrap();
        let pd = client.create_pd().unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        let connect = || client.connect(&qp, address, ConnectOptions::default(), LIMIT).unwrap();
        let connection = lab.within(Side::A, connect).unwrap();
        qp.post_send(&WorkRequest::send(1, Payload::Inline(b"seen from outside")).signaled()).unwrap();
        cq.spin(LIMIT).unwrap().check().unwrap();
        let accepted = accepted.join().unwrap();

        let qps = devices()[0]["queue_pairs"].as_array().unwrap().clone();
        assert_eq!(qps.len(), 1);
        assert_eq!((&qps[0]["state"], &qps[0]["peer"]), (&"rts".into(), &"[fd77::2]:4791".into()));
        assert_eq!(qps[0]["congestion"], "cubic");
        assert!(qps[0]["srtt_ns"].as_u64().unwrap() > 0 && qps[0]["bytes_out"].as_u64().unwrap() > 17);
        let table = xwarp(&["stat", "--pid", &id().to_string()]);
        assert!(text(&table.stdout).contains("[fd77::2]:4791"), "{}", text(&table.stdout));
        connection.disconnect().unwrap();
        accepted
    });
    drop(receiver);
    drop((server, client));
    // The capture ends with the device, and with a whole frame.
    assert!(capture.wait(LIMIT).unwrap().success(), "{}", capture.output());
    let told = xwarp(&["explain", &file.to_string_lossy()]);
    assert!(told.status.success(), "{}", text(&told.stderr));
    assert!(text(&told.stdout).contains("Send of 17 bytes, MSN 1"), "{}", text(&told.stdout));
    assert_eq!(devices(), Vec::<Value>::new(), "a closed device leaves no socket");
}

#[test]
fn netns_other_users_see_nothing_of_a_device() {
    let _alone = alone();
    let lab = Lab::up(LabOptions::default()).unwrap();
    let device = open(&lab, Side::A, true);
    let socket = fs::read_dir(DIRECTORY_OF_ROOT)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains(&format!("/{}-", id())))
        .unwrap();
    let nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
    let output = Command::new("setpriv")
        .args(nobody)
        .args([XWARP, "stat"])
        .env(DIRECTORY_VARIABLE, DIRECTORY_OF_ROOT)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("XWARP_OBSERVE=1"), "{}", text(&output.stderr));
    let connect = Command::new("setpriv")
        .args(nobody)
        .args(["perl", "-MIO::Socket::UNIX", "-e", "IO::Socket::UNIX->new(Peer => $ARGV[0]) or die $!"])
        .arg(&socket)
        .output()
        .unwrap();
    assert!(!connect.status.success());
    assert!(text(&connect.stderr).contains("Permission denied"), "{}", text(&connect.stderr));
    drop(device);
}

/// The socket of a process that was killed is not shown, and goes with the next device; whoever only looks removes nothing.
#[test]
fn netns_sockets_of_dead_processes_go_with_the_next_device() {
    let _alone = alone();
    let lab = Lab::up(LabOptions::default()).unwrap();
    let device = open(&lab, Side::A, true);
    let dead = format!("{DIRECTORY_OF_ROOT}/4194305-xw0-0");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    assert_eq!(devices().len(), 1);
    assert!(fs::exists(&dead).unwrap());
    let next = open(&lab, Side::B, true);
    assert!(!fs::exists(&dead).unwrap());
    drop((device, next));
}
