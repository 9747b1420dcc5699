//! An independent TCP, smoltcp, exchanges byte streams with ours over the virtual wire, under each fault that smoltcp
//! survives. Each end connects in turn, over IPv4 and IPv6. Our end is a bare TCP connection without MPA.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{net::SocketAddr, time::Duration};

use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{Device, DeviceCapabilities, Medium},
    socket::tcp::{Socket, SocketBuffer, State},
    time::Instant as SmolInstant,
    wire::{HardwareAddress, IpCidr},
};
use xwarp_tcp::{
    link::{FrameWriter, Link, RxFrame, rx_pieces},
    secret::Secret,
    seq::StreamOffset,
    sim::{
        Aim, Blackout, Faults, Gilbert, Node, Outcome, PathMtu, Recut, Resets, SimLink, Wire, WireConfig,
        path, run,
    },
    tcp::{Connection, Filled, IsnKey, Source, TcpConfig},
    time::Instant,
    ulp::CloseReason,
    wire::{Inbound, Mac, Path, Segment, parse},
};

const OUR_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const THEIR_MAC: Mac = Mac([2, 0, 0, 0, 0, 2]);
const TOTAL: u64 = 200_000;

/// The byte at `offset` of both streams.
fn pattern(offset: StreamOffset) -> u8 {
    (offset ^ offset >> 8 ^ offset >> 16).wrapping_mul(0x9d) as u8
}

/// Our data: full segments, then a FIN.
struct Stream(StreamOffset);

impl Source for Stream {
    fn has_data(&self) -> bool {
        true
    }

    fn fill(&mut self, offset: StreamOffset, out: &mut FrameWriter<'_>) -> Filled {
        assert_eq!(offset, self.0);
        let len = (out.room() as u64).min(TOTAL - self.0);
        if len == 0 {
            return if self.0 == TOTAL { Filled::Finish } else { Filled::Nothing };
        }
        let bytes: Vec<u8> = (offset..offset + len).map(pattern).collect();
        out.put(&bytes);
        self.0 += len;
        Filled::Segment { len: len as usize, more: true }
    }
}

/// Our end.
struct Ours {
    link: SimLink,
    conn: Option<Connection>,
    path: Path,
    config: TcpConfig,
    stream: Stream,
    acked: StreamOffset,
    closed: Option<CloseReason>,
}

impl Ours {
    fn isn(&self) -> xwarp_tcp::tcp::Isn {
        IsnKey::new(&Secret::from_number(3)).isn(Instant::ZERO, &self.path.flow)
    }

    fn segment(&mut self, now: Instant, segment: &Segment, frame: &RxFrame) {
        if self.conn.is_none() && segment.flags.is_plain_syn() {
            self.conn = Some(Connection::accept(
                now,
                &std::sync::Arc::new(self.config),
                self.path,
                segment,
                self.isn(),
            ));
            return;
        }
        let Some(conn) = &mut self.conn else { return };
        let receipt = conn.receive_one(now, &mut self.link, segment);
        self.closed = self.closed.or(receipt.closed);
        self.acked = receipt.acked.unwrap_or(self.acked);
        let Some(arrival) = receipt.arrival else { return };
        let bytes = rx_pieces(&self.link, frame, arrival.start, arrival.len);
        for (offset, byte) in (arrival.offset..).zip(bytes.iter().flat_map(|p| p.iter())) {
            assert_eq!(*byte, pattern(offset), "byte {offset} of their stream");
        }
        conn.payload_taken(now, &arrival);
    }
}

impl Node for Ours {
    fn turn(&mut self, now: Instant) -> bool {
        let mut batch = Vec::new();
        self.link.receive(&mut batch, 64);
        let received = !batch.is_empty();
        for frame in batch {
            match parse(&self.link, &frame) {
                Ok(Inbound::Tcp(segment)) => self.segment(now, &segment, &frame),
                Ok(Inbound::Icmp(error)) => {
                    let closed = self.conn.as_mut().and_then(|conn| conn.icmp(now, &error));
                    self.closed = self.closed.or(closed);
                }
                Ok(Inbound::Other) | Err(_) => {}
            }
            self.link.recycle(frame);
        }
        let Some(conn) = &mut self.conn else { return received };
        if conn.deadline().is_some_and(|d| d <= now) {
            self.closed = self.closed.or(conn.on_timer(now));
        }
        if !received {
            conn.flush_ack();
        }
        let sent = conn.transmit(now, &mut self.link, &mut self.stream, 64);
        self.closed = self.closed.or(sent.closed);
        self.link.flush();
        received || sent.more || sent.starved && sent.frames > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.conn.as_ref()?.deadline()
    }
}

/// The wire as smoltcp sees it: IP packets.
struct Phy(SimLink);

struct Received(Vec<u8>);

struct Sending<'a>(&'a mut SimLink);

impl smoltcp::phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0.get(14..).unwrap_or_default())
    }
}

impl smoltcp::phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; 14 + len];
        let result = f(&mut frame[14..]);
        frame[..6].copy_from_slice(&OUR_MAC.0);
        frame[6..12].copy_from_slice(&THEIR_MAC.0);
        let ethertype: u16 = if frame[14] >> 4 == 6 { 0x86dd } else { 0x0800 };
        frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
        self.0.inject(&frame);
        result
    }
}

impl Device for Phy {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _now: SmolInstant) -> Option<(Received, Sending<'_>)> {
        let mut batch = Vec::new();
        self.0.receive(&mut batch, 1);
        let frame = batch.pop()?;
        let bytes = self.0.rx_chunks(&frame).concat();
        self.0.recycle(frame);
        Some((Received(bytes), Sending(&mut self.0)))
    }

    fn transmit(&mut self, _now: SmolInstant) -> Option<Sending<'_>> {
        Some(Sending(&mut self.0))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1500;
        capabilities
    }
}

/// Their end.
struct Theirs {
    phy: Phy,
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    sent: StreamOffset,
    received: StreamOffset,
    next: Option<Instant>,
}

fn smol(now: Instant) -> SmolInstant {
    SmolInstant::from_micros_const((now.as_nanos() / 1000) as i64)
}

impl Theirs {
    fn new(link: SimLink, path: &Path, connect: bool) -> Self {
        let mut phy = Phy(link);
        let mut interface =
            Interface::new(Config::new(HardwareAddress::Ip), &mut phy, SmolInstant::from_micros_const(0));
        let ip = path.flow.remote.ip();
        interface.update_ip_addrs(|addrs| addrs.push(IpCidr::new(ip.into(), 24)).unwrap());
        // More than 64 KiB, so that windows are scaled.
        let buffer = || SocketBuffer::new(vec![0; 100_000]);
        let mut socket = Socket::new(buffer(), buffer());
        if connect {
            let (local, remote) = (path.flow.remote.port(), path.flow.local);
            socket.connect(interface.context(), remote, local).unwrap();
        } else {
            socket.listen(path.flow.remote.port()).unwrap();
        }
        let mut sockets = SocketSet::new(Vec::new());
        let handle = sockets.add(socket);
        Self { phy, interface, sockets, handle, sent: 0, received: 0, next: Some(Instant::ZERO) }
    }

    fn state(&self) -> State {
        self.sockets.get::<Socket<'_>>(self.handle).state()
    }

    /// The application: sends its stream and checks ours.
    fn work(&mut self) -> bool {
        let socket = self.sockets.get_mut::<Socket<'_>>(self.handle);
        let before = (self.sent, self.received);
        while socket.can_send() && self.sent < TOTAL {
            let bytes: Vec<u8> = (self.sent..TOTAL.min(self.sent + 5000)).map(pattern).collect();
            self.sent += socket.send_slice(&bytes).unwrap() as u64;
        }
        while socket.can_recv() {
            let mut bytes = vec![0; 5000];
            let len = socket.recv_slice(&mut bytes).unwrap();
            for byte in &bytes[..len] {
                assert_eq!(*byte, pattern(self.received), "byte {} of our stream", self.received);
                self.received += 1;
            }
        }
        if self.sent == TOTAL && socket.may_send() {
            socket.close();
        }
        before != (self.sent, self.received)
    }
}

impl Node for Theirs {
    fn turn(&mut self, now: Instant) -> bool {
        let arrivals = self.phy.0.has_arrivals();
        self.interface.poll(smol(now), &mut self.phy, &mut self.sockets);
        let worked = self.work();
        if worked {
            self.interface.poll(smol(now), &mut self.phy, &mut self.sockets);
        }
        // A deadline that has already passed is due in one microsecond, the resolution of smoltcp's clock.
        let at = self.interface.poll_at(smol(now), &self.sockets);
        self.next = at.map(|at| {
            Instant::from_nanos(at.total_micros().max(0) as u64 * 1000).max(now + Duration::from_micros(1))
        });
        arrivals || worked
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.next
    }
}

/// Exchanges both streams completely and closes both ends.
fn exchange(name: &str, faults: &[Faults; 2], seed: u64) {
    for (v6, we_connect) in [(false, true), (false, false), (true, true), (true, false)] {
        let context = format!("{name}, seed {seed}, IPv6 {v6}, we connect {we_connect}");
        let [local, remote] =
            if v6 { ["[fd00::1]:4000", "[fd00::2]:4001"] } else { ["10.0.0.1:4000", "10.0.0.2:4001"] };
        let [local, remote] = [local, remote].map(|address| address.parse::<SocketAddr>().unwrap());
        let path = path(local, remote);
        let (wire, near, far) = Wire::new(WireConfig { faults: *faults, seed, ..WireConfig::default() });
        let long = Duration::from_secs(3600);
        let config =
            TcpConfig { user_timeout: long, connect_timeout: long, time_wait: long, ..TcpConfig::default() };
        let mut ours =
            Ours { link: near, conn: None, path, config, stream: Stream(0), acked: 0, closed: None };
        if we_connect {
            ours.conn =
                Some(Connection::connect(Instant::ZERO, &std::sync::Arc::new(config), path, ours.isn()));
        }
        let mut theirs = Theirs::new(far, &path, !we_connect);
        let outcome = run(&wire, &mut [&mut ours, &mut theirs], Instant::ZERO, long / 2, |_, _| false);
        let what = (theirs.received, theirs.sent, ours.acked, ours.closed, theirs.state());
        assert_eq!(theirs.received, TOTAL, "{context}: {outcome:?} {what:?}");
        let conn = ours.conn.as_mut().unwrap();
        // Their FIN counts as one byte.
        assert!(conn.contiguous() >= TOTAL, "{context}: {what:?} {:?}", conn.info());
        assert!(ours.acked >= TOTAL, "{context}: {what:?}");
        assert_eq!(ours.closed, Some(CloseReason::Graceful), "{context}: {what:?}");
        assert!(matches!(theirs.state(), State::Closed | State::TimeWait), "{context}: {what:?}");
        assert!(!matches!(outcome, Outcome::Done(_)));
        conn.release(&mut ours.link);
        ours.link.flush();
        assert_eq!(
            (ours.link.census().tx_out, ours.link.census().rx_out),
            (0, 0),
            "{context}: frames leaked"
        );
    }
}

fn base() -> Faults {
    Faults { delay: Duration::from_micros(200), ..Faults::default() }
}

#[test]
fn sim_smoltcp_over_a_clean_wire() {
    exchange("clean", &[base(); 2], 1);
    let line = Faults { rate_bytes: Some(1_000_000), queue_frames: 20, mark_frames: 5, ..base() };
    exchange("a slow line", &[line; 2], 1);
}

#[test]
fn sim_smoltcp_under_loss() {
    for seed in 1..=4 {
        exchange("loss", &[Faults { loss: 0.02, ..base() }; 2], seed);
        let bursts = Some(Gilbert { enter: 0.003, leave: 0.3, loss: 0.8 });
        exchange("bursts", &[Faults { bursts, ..base() }; 2], seed);
        exchange("corruption", &[Faults { corrupt: 0.02, ..base() }; 2], seed);
        let blackout = Blackout {
            from: Instant::ZERO + Duration::from_millis(3),
            length: Duration::from_millis(100),
            every: Some(Duration::from_secs(1)),
        };
        exchange("blackouts", &[Faults { blackout: Some(blackout), ..base() }; 2], seed);
    }
}

#[test]
fn sim_smoltcp_under_reordering_duplication_and_recutting() {
    for seed in 1..=4 {
        let reorder =
            Faults { reorder: 0.2, reorder_by: Duration::from_millis(2), reorder_depth: 20, ..base() };
        exchange("reordering", &[reorder; 2], seed);
        exchange("duplication", &[Faults { duplicate: 0.1, ..reorder }; 2], seed);
        let wait = Duration::from_micros(50);
        let recut = Some(Recut { split: 0.3, join: 0.3, wait, most_bytes: 1500 });
        exchange("a middlebox", &[Faults { recut, loss: 0.01, ..base() }; 2], seed);
    }
}

/// Faults that smoltcp does not survive affect only frames towards us.
#[test]
fn sim_smoltcp_narrow_paths_and_forged_resets_towards_us() {
    for seed in 1..=4 {
        for aim in [Aim::Near, Aim::Far] {
            let resets = Some(Resets { chance: 0.05, aim });
            exchange("forged resets", &[base(), Faults { resets, ..base() }], seed);
        }
        let mtu = Some(PathMtu { from: Instant::ZERO, bytes: 1300, icmp: true });
        exchange("a narrow path", &[Faults { mtu, ..base() }, base()], seed);
    }
}
