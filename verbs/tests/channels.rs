//! Notification channels: descriptors under an edge-triggered poller, objects with `poll`, and futures for tokio.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    thread,
    time::Duration,
};

use common::{LIMIT, connect, devices, queue_pair};
use rustix::event::{Timespec, epoll};
use xwarp_verbs::{
    AsyncEvent, CompletionChannel, CompletionQueueOptions, Device, Payload, Progress, QueuePair,
    QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connecting, Connection, ConnectionError, EventKind, ListenOptions},
    sim,
    tokio::{AsyncCompletionQueue, EventStream},
};

/// An edge-triggered poller of one descriptor.
struct EdgePoller(OwnedFd);

impl EdgePoller {
    fn of(fd: impl AsFd) -> Self {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, fd, epoll::EventData::new_u64(0), flags).unwrap();
        Self(epoll)
    }

    /// Whether an edge comes within `limit`.
    fn edge(&self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).unwrap();
        let mut events = Vec::with_capacity(4);
        epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut events), Some(&limit)).unwrap() > 0
    }
}

#[test]
fn each_notification_is_an_edge() {
    let pair = devices(Progress::Auto);
    let channel = CompletionChannel::new().unwrap();
    let pd = pair[0].create_pd().unwrap();
    let queue = |context| {
        let channel = Some(channel.clone());
        let options = CompletionQueueOptions { channel, context, ..Default::default() };
        pair[0].create_cq_with(options).unwrap()
    };
    let queues = [queue(70), queue(71)];
    let poller = EdgePoller::of(&channel);
    let qps: Vec<QueuePair> =
        queues.iter().map(|cq| pd.create_qp(cq, cq, QueuePairOptions::default()).unwrap()).collect();
    for (cq, qp) in queues.iter().zip(&qps) {
        qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
        cq.arm(false);
        // The flush completes the receive; the notification of the first queue is left in the channel.
        qp.abort().unwrap();
        assert!(poller.edge(LIMIT), "no edge for {cq:?}");
    }
    assert!(!poller.edge(Duration::ZERO));
    let notified: Vec<_> = std::iter::from_fn(|| channel.poll()).map(|n| (n.cq, n.context)).collect();
    assert_eq!(notified, [(queues[0].id(), 70), (queues[1].id(), 71)]);
    assert_eq!(channel.as_raw_fd(), channel.as_fd().as_raw_fd());
}

/// Both ends of a connection, established by one thread with `poll` and descriptors alone.
fn connect_by_polling(
    [server, client]: &[Device; 2],
    server_qp: &QueuePair,
    client_qp: &QueuePair,
) -> [Connection; 2] {
    let address = SocketAddr::new(sim::ipv4(1), 1);
    let listener = server.listen(address, ListenOptions::default()).unwrap();
    assert!(listener.poll().unwrap().is_none());
    let mut initiator = client.start_connect(client_qp, address, ConnectOptions::default(), LIMIT).unwrap();
    let mut request = loop {
        assert!(initiator.poll().is_none(), "nobody has accepted");
        if let Some(request) = listener.poll().unwrap() {
            break request;
        }
        server.wait(&listener, Some(Duration::from_millis(5))).unwrap();
        client.wait(&initiator, Some(Duration::from_millis(5))).unwrap();
    };
    let mut responder = request.start_accept(server_qp, AcceptOptions::default()).unwrap();
    [(server, &mut responder), (client, &mut initiator)].map(|(device, connecting)| {
        loop {
            if let Some(outcome) = connecting.poll() {
                assert!(connecting.poll().is_none(), "the outcome is returned once");
                break outcome.unwrap();
            }
            assert!(device.wait(&*connecting, Some(LIMIT)).unwrap());
        }
    })
}

#[test]
fn listeners_and_connections_are_polled_without_blocking() {
    let pair = devices(Progress::Auto);
    let (_server_pd, _server_cq, server_qp) = queue_pair(&pair[0], QueuePairOptions::default());
    let (_client_pd, _client_cq, client_qp) = queue_pair(&pair[1], QueuePairOptions::default());
    let [server, client] = connect_by_polling(&pair, &server_qp, &client_qp);
    assert!(client.poll().is_none());
    server.disconnect().unwrap();
    assert!(pair[1].wait(&client, Some(LIMIT)).unwrap());
    assert!(matches!(client.poll(), Some(EventKind::Disconnected)));
}

#[test]
fn an_abandoned_attempt_takes_its_identifier_along() {
    let pair = devices(Progress::Auto);
    let (_pd, _cq, qp) = queue_pair(&pair[1], QueuePairOptions::default());
    let nobody = SocketAddr::new(sim::ipv4(9), 1);
    let attempt = pair[1].start_connect(&qp, nobody, ConnectOptions::default(), LIMIT).unwrap();
    drop(attempt);
    let refused = SocketAddr::new(sim::ipv4(1), 1);
    let attempt: Connecting<'_> =
        pair[1].start_connect(&qp, refused, ConnectOptions::default(), LIMIT).unwrap();
    assert!(matches!(attempt.wait(LIMIT), Err(ConnectionError::Failed(_))));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(LIMIT, future).await.expect("a wake-up was lost")
}

#[test]
fn tokio_awaits_connections_completions_and_events() {
    const ROUNDS: u64 = 300;
    let pair = devices(Progress::Auto);
    let address = SocketAddr::new(sim::ipv4(1), 1);
    let listener = pair[0].listen(address, ListenOptions::default()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            runtime().block_on(within(async {
                let mut cq = AsyncCompletionQueue::create(&pair[0], 16).unwrap();
                let qp =
                    pair[0].create_pd().unwrap().create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
                qp.post_recv(&RecvRequest::new(0, &[])).unwrap();
                let mut request = listener.next().await.unwrap();
                let accepted = request.start_accept(&qp, AcceptOptions::default()).unwrap();
                let connection = accepted.established().await.unwrap();
                for round in 0..ROUNDS {
                    assert_eq!(cq.next().await.unwrap().check().unwrap().wr_id, round);
                    qp.post_recv(&RecvRequest::new(round + 1, &[])).unwrap();
                    qp.post_send(&WorkRequest::send(0, Payload::EMPTY)).unwrap();
                }
                connection.disconnected().await.unwrap();
            }));
        });
        runtime().block_on(within(async {
            let mut cq = AsyncCompletionQueue::create(&pair[1], 16).unwrap();
            let qp = pair[1].create_pd().unwrap().create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
            let connecting = pair[1].start_connect(&qp, address, ConnectOptions::default(), LIMIT).unwrap();
            let connection = connecting.established().await.unwrap();
            for round in 0..ROUNDS {
                qp.post_recv(&RecvRequest::new(round, &[])).unwrap();
                qp.post_send(&WorkRequest::send(0, Payload::EMPTY)).unwrap();
                assert_eq!(cq.next().await.unwrap().check().unwrap().wr_id, round);
            }
            connection.disconnect().unwrap();
        }));
    });
}

#[test]
fn tokio_awaits_asynchronous_events() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    runtime().block_on(async {
        let mut events = EventStream::new(server.device.async_events()).unwrap();
        let fatal = async {
            client.qp.abort().unwrap();
            events.next().await.unwrap()
        };
        let event = within(fatal).await;
        assert!(matches!(event, AsyncEvent::QpFatal { qp, .. } if qp == server.qp.id()), "{event:?}");
    });
}

#[test]
fn tokio_refuses_a_device_without_a_progress_thread() {
    let pair = devices(Progress::Application);
    runtime().block_on(async {
        let refused = AsyncCompletionQueue::create(&pair[0], 16).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::Unsupported);
    });
}
