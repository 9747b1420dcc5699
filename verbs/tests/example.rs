//! Runs the documented example unchanged, over the in-memory interface; the crate's documentation shows it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../examples/hello/client.rs"]
mod client;
#[path = "../examples/hello/server.rs"]
mod server;

use std::{net::SocketAddr, sync::mpsc, thread};

use xwarp_verbs::{
    Device, DeviceOptions, Progress,
    sim::{self, WireConfig},
};

fn hello(progress: Progress, address: SocketAddr) {
    exchange(progress, address, "hello, memory");
}

fn exchange(progress: Progress, address: SocketAddr, text: &str) {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    let open = |end| Device::over(Box::new(end), DeviceOptions { progress, ..Default::default() }).unwrap();
    let (server, client) = (open(a), open(b));
    let (ready, listening) = mpsc::channel();
    thread::scope(|scope| {
        let served = scope.spawn(move || {
            server::serve(&server, address, |at| ready.send(at).unwrap()).map_err(|e| e.to_string())
        });
        let port = listening.recv().unwrap().port();
        let ip = if address.is_ipv4() { sim::ipv4(1) } else { sim::ipv6(1) };
        let answer = client::ask(&client, SocketAddr::new(ip, port), text).unwrap();
        assert_eq!(answer, text.to_ascii_uppercase());
        assert_eq!(served.join().unwrap().unwrap(), text);
    });
}

#[test]
fn the_example_runs_with_a_thread_helping() {
    hello(Progress::Auto, SocketAddr::from(([0, 0, 0, 0], 4791)));
}

#[test]
fn the_example_runs_over_ipv6_and_any_port() {
    hello(Progress::Thread, SocketAddr::new(sim::ipv6(1), 0));
}

#[test]
fn the_example_runs_without_threads_of_ours() {
    hello(Progress::Application, SocketAddr::new(sim::ipv4(1), 0));
}

/// Also longer than inline data and than a page, and characters whose capitals are longer than themselves.
#[test]
fn the_example_takes_a_text_of_any_length() {
    for length in [0, 1, 128, 129, 4096, 4097, 1 << 20] {
        let text: String = "memory".chars().cycle().take(length).collect();
        exchange(Progress::Auto, SocketAddr::new(sim::ipv4(1), 0), &text);
    }
    exchange(Progress::Auto, SocketAddr::new(sim::ipv4(1), 0), &"\u{149}\u{390}".repeat(100));
}
