//! Streams and listeners under tokio.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    future::{Future, poll_fn},
    io::ErrorKind,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt, ReadBuf};
use xwarp_sdp::{Sdp, SdpListener, SdpOptions, SdpStream};
use xwarp_verbs::{
    Device, DeviceOptions,
    sim::{self, WireConfig},
};

const LIMIT: Duration = Duration::from_secs(20);

fn services() -> [Sdp; 2] {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    [a, b].map(|end| {
        let device = Device::over(Box::new(end), DeviceOptions::default()).unwrap();
        Sdp::new(&device, SdpOptions::default()).unwrap()
    })
}

fn address() -> SocketAddr {
    (sim::ipv4(1), 7).into()
}

fn run<R>(future: impl Future<Output = R>) -> R {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LIMIT, future).await.expect("a wake-up was lost") })
}

/// Runs two futures at the same time.
async fn join<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut of_a, mut of_b) = (None, None);
    poll_fn(|cx| {
        if of_a.is_none()
            && let Poll::Ready(done) = a.as_mut().poll(cx)
        {
            of_a = Some(done);
        }
        if of_b.is_none()
            && let Poll::Ready(done) = b.as_mut().poll(cx)
        {
            of_b = Some(done);
        }
        if of_a.is_none() || of_b.is_none() {
            return Poll::Pending;
        }
        Poll::Ready(of_a.take().zip(of_b.take()).unwrap())
    })
    .await
}

async fn pair([server, client]: &[Sdp; 2]) -> (SdpStream, SdpStream) {
    let listener = SdpListener::bind(server, address()).unwrap();
    let (accepted, connected) =
        join(listener.accept_async(), SdpStream::connect_async(client, address())).await;
    (accepted.unwrap().0, connected.unwrap())
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

async fn exchange(stream: SdpStream, out: Vec<u8>) -> Vec<u8> {
    let mut writer = stream.try_clone().unwrap();
    let write = async {
        writer.write_all(&out).await.unwrap();
        AsyncWriteExt::shutdown(&mut writer).await.unwrap();
    };
    let (mut reader, mut got) = (stream, Vec::new());
    let (read, ()) = join(reader.read_to_end(&mut got), write).await;
    read.unwrap();
    got
}

#[test]
fn tokio_tasks_carry_both_directions_at_once() {
    let services = services();
    run(async {
        let (accepted, connected) = pair(&services).await;
        let (up, down) = (pattern(3_000_000, 1), pattern(2_000_000, 99));
        let (got_up, got_down) =
            join(exchange(accepted, down.clone()), exchange(connected, up.clone())).await;
        assert!(got_up == up && got_down == down);
    });
}

#[test]
fn tokio_accepts_and_serves_many_connections_on_one_thread() {
    const CONNECTIONS: u32 = 50;
    let [server, client] = services();
    run(async {
        let listener = SdpListener::bind(&server, address()).unwrap();
        let serve = async {
            let mut tasks = Vec::new();
            for _ in 0..CONNECTIONS {
                let (mut stream, _) = listener.accept_async().await.unwrap();
                tasks.push(tokio::task::spawn(async move {
                    let mut number = [0; 4];
                    stream.read_exact(&mut number).await.unwrap();
                    stream.write_all(&number).await.unwrap();
                }));
            }
            for task in tasks {
                task.await.unwrap();
            }
        };
        let call = async {
            for number in 0..CONNECTIONS {
                let mut stream = SdpStream::connect_async(&client, address()).await.unwrap();
                stream.write_all(&number.to_be_bytes()).await.unwrap();
                let mut back = [0; 4];
                stream.read_exact(&mut back).await.unwrap();
                assert_eq!(u32::from_be_bytes(back), number);
                assert_eq!(stream.read(&mut back).await.unwrap(), 0);
            }
        };
        join(serve, call).await;
    });
}

#[test]
fn tokio_reads_end_with_the_connection() {
    let services = services();
    run(async {
        let (accepted, mut connected) = pair(&services).await;
        let reads = async { connected.read(&mut [0; 9]).await.unwrap_err().kind() };
        let aborts = async {
            tokio::task::yield_now().await;
            accepted.abort();
        };
        assert_eq!(join(reads, aborts).await.0, ErrorKind::ConnectionReset);
    });
}

#[test]
fn tokio_connects_are_refused_where_nobody_listens() {
    let [_server, client] = services();
    run(async {
        let error = SdpStream::connect_async(&client, address()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        // A future that was dropped has abandoned its attempt.
        drop(SdpStream::connect_async(&client, address()));
    });
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A task that waits to read and one that waits to write do not wake each other while nothing happens.
#[test]
fn tokio_tasks_that_wait_do_not_wake_each_other() {
    let services = services();
    let (accepted, connected) = run(pair(&services));
    let [reads, writes] = [(); 2].map(|()| Arc::new(Wakes::default()));
    let read = || {
        let waker = Waker::from(Arc::clone(&reads));
        let mut bytes = [0; 9];
        Pin::new(&mut &connected).poll_read(&mut Context::from_waker(&waker), &mut ReadBuf::new(&mut bytes))
    };
    let write = || {
        let waker = Waker::from(Arc::clone(&writes));
        Pin::new(&mut &connected).poll_write(&mut Context::from_waker(&waker), &[7; 8192])
    };
    // The peer does not read. Its acknowledgements cease some time after the last write.
    let before = |n: &Wakes| n.0.load(Ordering::SeqCst);
    let end = std::time::Instant::now() + LIMIT;
    loop {
        assert!(std::time::Instant::now() < end, "the stream never fills");
        while write().is_ready() {}
        assert!(read().is_pending());
        std::thread::sleep(Duration::from_millis(50));
        let (reads_before, writes_before) = (before(&reads), before(&writes));
        // Both are registered from here on, and neither wakes the other.
        if write().is_pending() && read().is_pending() && write().is_pending() {
            let quiet = (before(&reads), before(&writes)) == (reads_before, writes_before);
            if quiet {
                break;
            }
        }
    }
    accepted.abort();
    while !matches!(read(), Poll::Ready(Err(_))) {
        assert!(std::time::Instant::now() < end, "the end of the connection is not seen");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(before(&reads) > 0 && before(&writes) > 0, "the end wakes both");
}
