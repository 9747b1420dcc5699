//! A process without file descriptors left. A test file, and so a process, of its own.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{fs::File, thread};

use common::{LIMIT, devices, queue_pair};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use xwarp_verbs::{
    Progress, QueuePairOptions,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
    sim,
};

#[test]
fn a_request_waits_while_there_is_no_descriptor_for_its_channel() {
    let [server, client] = devices(Progress::Auto);
    let address = (sim::ipv4(1), 7).into();
    let listener = server.listen(address, ListenOptions::default()).unwrap();
    let (_cpd, _ccq, client_qp) = queue_pair(&client, QueuePairOptions::default());
    let (_spd, _scq, server_qp) = queue_pair(&server, QueuePairOptions::default());
    thread::scope(|scope| {
        let connecting =
            scope.spawn(|| client.connect(&client_qp, address, ConnectOptions::default(), LIMIT));
        assert!(server.wait(&listener, Some(LIMIT)).unwrap());
        // 256 descriptors are allowed, and all of them are in use.
        let limits = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limits }).unwrap();
        let files: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).take(1000).collect();
        assert!(files.len() < 256);
        let refused = listener.poll();
        setrlimit(Resource::Nofile, limits).unwrap();
        drop(files);
        assert!(refused.is_err(), "{refused:?}");
        let mut request = listener.poll().unwrap().expect("the request waits");
        request.accept(&server_qp, AcceptOptions::default(), LIMIT).unwrap();
        connecting.join().unwrap().unwrap();
    });
}
