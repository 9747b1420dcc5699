//! A peer that mutates one field of one message, over whole engines and a wire with faults: its connection ends, the
//! server does not panic, hang or change memory, and other connections continue.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use xwarp_sdp::{
    Sdp, SdpListener, SdpOptions, SdpStream,
    machine::{Action, Config, Machine},
    wire::{Advert, Mode},
};
use xwarp_verbs::{
    Access, CompletionQueue, Device, DeviceOptions, FramingConfig, Markers, Memory, MemoryRegion, MpaConfig,
    Pages, Payload, QueuePair, QueuePairOptions, RecvRequest, Remote, Rtr, STag, Sge, WcStatus, WorkRequest,
    cm::ConnectOptions,
    sim::{self, Faults, WireConfig},
};

const LIMIT: Duration = Duration::from_secs(60);
/// Time for which the hostile peer continues without an event.
const IDLE: Duration = Duration::from_millis(200);
const SLOT: usize = 16 << 10;
const RECEIVES: usize = 48;
const SENDS: usize = 16;
/// Memory that the hostile peer advertises, and receives into.
const PIECE: u32 = 40_000;
const SEEDS: u64 = 48;
/// Messages of the peer up to which one is mutated, and bytes of its headers.
const MESSAGES: u64 = 7;
const FIELDS: u64 = 36;

fn devices(seed: u64) -> [Device; 2] {
    let faults = Faults { loss: 0.01, duplicate: 0.01, reorder: 0.02, reorder_depth: 8, ..Faults::default() };
    let wire = WireConfig { faults: [faults; 2], seed, ..WireConfig::default() };
    let (a, b) = sim::pair(wire, 1500).unwrap();
    [a, b].map(|end| Device::over(Box::new(end), DeviceOptions::default()).unwrap())
}

fn settings() -> Config {
    Config { buffer_bytes: 4096, most_buffer_bytes: 4096, desired_bytes: 4096, ..Config::default() }
}

/// A machine on plain verbs.
struct Peer {
    machine: Machine,
    cq: CompletionQueue,
    qp: QueuePair,
    receives: MemoryRegion,
    sends: MemoryRegion,
    memory: MemoryRegion,
    free_receives: Vec<usize>,
    free_sends: Vec<usize>,
    sent: u64,
    seed: u64,
}

impl Peer {
    /// Connects, runs a program with every operation, and mutates the message that the seed chooses.
    fn run(device: &Device, address: SocketAddr, seed: u64) {
        let (machine, hello) = Machine::connect(&settings());
        let cq = device.create_cq(256).unwrap();
        let pd = device.create_pd().unwrap();
        let options = QueuePairOptions { max_send_wr: 64, max_recv_wr: 64, ..QueuePairOptions::default() };
        let qp = pd.create_qp(&cq, &cq, options).unwrap();
        let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mut peer = Self {
            machine,
            receives: pd.allocate(RECEIVES * SLOT, Access::LOCAL_WRITE).unwrap(),
            sends: pd.allocate(SENDS * SLOT, Access::empty()).unwrap(),
            memory: pd.allocate(PIECE as usize, all).unwrap(),
            cq,
            qp,
            free_receives: (0..RECEIVES).collect(),
            free_sends: (0..SENDS).collect(),
            sent: 0,
            seed,
        };
        peer.post(peer.machine.receives_to_post().0);
        let mpa =
            MpaConfig { peer_to_peer: vec![Rtr::EmptyFpdu], markers: Markers::Off, ..MpaConfig::default() };
        let framing = Some(FramingConfig::Mpa(mpa));
        let options = ConnectOptions { private_data: hello, framing, ird: 8, ord: 8, ..Default::default() };
        let Ok(connection) = device.connect(&peer.qp, address, options, LIMIT) else { return };
        let advert = Advert { len: PIECE, stag: peer.memory.key().value(), offset: 0 };
        peer.machine.write(b"hello");
        peer.machine.write_memory(advert);
        peer.machine.read_memory(advert);
        if seed.is_multiple_of(2) {
            peer.machine.change_mode(Mode::Pipelined);
        }
        peer.machine.write_oob(b'!');
        peer.machine.write(&[7; 9000]);
        peer.machine.shutdown();
        let mut idle = Instant::now();
        while idle.elapsed() < IDLE && !connection.wait_disconnected(Duration::ZERO).unwrap_or(true) {
            if peer.turn() {
                idle = Instant::now();
            } else {
                thread::sleep(Duration::from_millis(1));
            }
        }
        let _ = peer.qp.abort();
    }

    fn post(&mut self, count: u16) {
        for _ in 0..count {
            let Some(slot) = self.free_receives.pop() else { return };
            let piece = self.receives.sge(slot * SLOT, SLOT);
            let _ = self.qp.post_recv(&RecvRequest::new(slot as u64, &[piece]));
        }
    }

    /// Handles completions and actions; returns whether there were any.
    fn turn(&mut self) -> bool {
        let mut acted = false;
        while let Some(completion) = self.cq.poll_one() {
            acted = true;
            let (kind, slot) = (completion.wr_id >> 32, (completion.wr_id & 0xffff_ffff) as usize);
            match kind {
                0 => {
                    self.free_receives.push(slot);
                    if completion.status == WcStatus::Success {
                        let bytes = self.receives.to_vec(slot * SLOT, completion.byte_len as usize).unwrap();
                        self.machine.receive(&bytes, completion.invalidated.map(STag::value));
                    }
                }
                1 => self.free_sends.push(slot),
                2 => self.machine.read_done(),
                _ => {}
            }
        }
        let mut bytes = Vec::new();
        loop {
            while self.machine.notice().is_some() {}
            let Some(action) = self.machine.poll(!self.free_sends.is_empty(), &mut bytes) else { break };
            acted = true;
            self.execute(action, &mut bytes);
        }
        acted
    }

    fn execute(&mut self, action: Action, bytes: &mut Vec<u8>) {
        let sge = |piece: Advert| Sge { key: STag::new(piece.stag), offset: piece.offset, len: piece.len };
        let place = |piece: Advert| Remote { key: STag::new(piece.stag), offset: piece.offset };
        let request = match action {
            Action::PostReceives { count, .. } => return self.post(count),
            Action::Send { memory, invalidate, .. } => {
                if let Some(piece) = memory {
                    let copied = self.memory.to_vec(piece.offset as usize, piece.len as usize);
                    bytes.extend(copied.unwrap_or_default());
                }
                self.mutate(bytes);
                let Some(slot) = self.free_sends.pop() else { return };
                self.sends.write(slot * SLOT, bytes).unwrap();
                let payload = Payload::Piece(self.sends.sge(slot * SLOT, bytes.len()));
                let id = 1 << 32 | slot as u64;
                let request = match invalidate {
                    Some(key) => WorkRequest::send_with_invalidate(id, payload, STag::new(key)),
                    None => WorkRequest::send(id, payload),
                };
                let _ = self.qp.post_send(&request.signaled().solicited());
                return;
            }
            Action::Read { remote, local } => WorkRequest::read(2 << 32, sge(local), place(remote)),
            Action::Write { local, remote } => WorkRequest::write(3 << 32, sge(local), place(remote)),
            Action::Disconnect | Action::Reset { .. } | Action::Reconnect { .. } => return,
        };
        let _ = self.qp.post_send(&request.signaled());
    }

    /// Changes one byte of the headers of the chosen message.
    fn mutate(&mut self, bytes: &mut [u8]) {
        let (message, at) = (self.seed % MESSAGES, (self.seed * 5 % FIELDS) as usize);
        if self.sent == message
            && let Some(byte) = bytes.get_mut(at)
        {
            *byte = match self.seed % 4 {
                0 => byte.wrapping_add(1),
                1 => *byte ^ 0x80,
                2 => 0xff,
                _ => byte.wrapping_sub(1),
            };
        }
        self.sent += 1;
    }
}

/// The program of a server: sends, and receives in both ways until the end.
fn serve(stream: &SdpStream) {
    let memory = Memory::anonymous(PIECE as usize, Pages::Normal).unwrap();
    let mut plain = stream;
    let _ = plain.write(&[1; 5000]);
    for turn in 0.. {
        let received = if turn % 4 == 3 {
            plain.read(&mut [0; 100])
        } else {
            stream.recv_memory(&memory, 0..PIECE as usize)
        };
        match received {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
}

#[test]
fn sim_sdp_s16_a_peer_that_mutates_one_field_ends_its_connection_only() {
    let [a, b] = devices(5);
    let options = SdpOptions { connection: settings(), ..SdpOptions::default() };
    let server = Sdp::new(&a, options.clone()).unwrap();
    let listener = SdpListener::bind(&server, (sim::ipv4(1), 7).into()).unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let client = Sdp::new(&b, options).unwrap();
    // An honest connection, which is used between the attacks.
    let mut honest = SdpStream::connect_timeout(&client, address, LIMIT).unwrap();
    let (mut echo, _) = listener.accept().unwrap();
    for stream in [&honest, &echo] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
    }
    let (served, done) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let served = served.clone();
            thread::spawn(move || {
                // A silent peer must not block the test.
                stream.set_read_timeout(Some(LIMIT / 2)).unwrap();
                serve(&stream);
                served.send(())
            });
        }
    });
    for seed in 0..SEEDS {
        Peer::run(&b, address, seed);
        done.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("seed {seed}: the server's program waits"));
        honest.write_all(&seed.to_be_bytes()).unwrap();
        let mut bytes = [0; 8];
        echo.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, seed.to_be_bytes());
    }
    let counters = server.counters();
    let violations: u64 =
        counters.iter().filter(|(name, _)| !name.starts_with("sdp_bytes")).map(|(_, n)| n).sum();
    assert!(violations >= SEEDS / 4, "few mutations were noticed: {counters:?}");
}
