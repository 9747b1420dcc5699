//! An application that polls all the time answers a message before TCP has processed the acknowledgement that the message has
//! brought.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{sync::Arc, time::Duration};

use common::{
    End, connect,
    probe::{Probe, Probed},
};
use xwarp_verbs::{
    Device, DeviceOptions, Opcode, Payload, Progress, RecvRequest, WorkRequest,
    sim::{self, WireConfig},
};

/// Messages after which an application counts as polling, and the connection's first acknowledgements are over.
const WARM_UP: usize = 100;

fn send(end: &End) {
    end.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    end.qp.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
}

/// Takes the next completion.
fn next(end: &End) -> Opcode {
    end.cq.poll_one().expect("the frame has arrived").check().unwrap().opcode
}

/// Segments whose acknowledgement is not processed yet.
fn in_flight(end: &End) -> usize {
    end.qp.tcp_info().unwrap().chunks_retained
}

/// A server that answers, and a client that has just got its answer, at the end of some exchanges. Neither has a progress thread.
fn answered() -> ([End; 2], Arc<Probe>) {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    let (b, probe) = Probed::new(b);
    let options = DeviceOptions { progress: Progress::Application, ..Default::default() };
    let devices =
        [Device::over(Box::new(a), options.clone()).unwrap(), Device::over(Box::new(b), options).unwrap()];
    let ends = connect(&devices, 1);
    let [server, client] = &ends;
    let exchange = || {
        server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
        send(client);
        // One turn: a second one would send the acknowledgement.
        while next(server) != Opcode::Recv {}
        server.qp.post_send(&WorkRequest::send(2, Payload::EMPTY)).unwrap();
    };
    let mut exchanges = 0;
    // A test that is descheduled in the last exchange may find a timer due, before which the engine catches up.
    while exchanges < WARM_UP || in_flight(client) == 0 {
        exchange();
        // Programs rely on this order.
        assert_eq!([next(client), next(client)], [Opcode::Send, Opcode::Recv]);
        exchanges += 1;
        assert!(exchanges < 10 * WARM_UP, "nothing is ever postponed");
    }
    (ends, probe)
}

#[test]
fn an_answer_does_not_gather_behind_what_is_acknowledged() {
    let ([_server, client], probe) = answered();
    let before = probe.frames();
    send(&client);
    assert_eq!(probe.frames() - before, 1);
}

#[test]
fn an_application_that_waits_catches_up() {
    let ([_server, client], _) = answered();
    let (silent, _writer) = std::io::pipe().unwrap();
    assert!(!client.device.wait(silent, Some(Duration::from_millis(1))).unwrap());
    assert_eq!(in_flight(&client), 0);
}
