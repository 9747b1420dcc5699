//! [`Tap`]: records every frame that crosses an interface, in both directions, to a pcapng file. AF_XDP bypasses the
//! kernel's packet sockets, so tcpdump cannot see this traffic.

use std::{
    borrow::Cow,
    fs::{File, TryLockError},
    io::{self, BufWriter, Write},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use pcap_file::{
    DataLink, PcapError,
    pcapng::{
        PcapNgWriter,
        blocks::{
            enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption},
            interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption},
        },
    },
};
use xwarp_tcp::{
    forward_link,
    link::{Link, QueueId, RingFull, RxFrame, TxFrame, rx_pieces},
};

use crate::{forward_interface, interface::Interface, system::lock};

/// Bytes that may be buffered before they are written.
const BUFFER_BYTES: usize = 1 << 18;
/// Longest time that bytes stay buffered while there is traffic.
const FLUSH_EVERY: Duration = Duration::from_millis(100);

/// Direction bits of a packet's flags word (pcapng, section 4.3.1).
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// Creates the file of a capture. While another process, or another device of this one, writes a file of this name, the process id
/// becomes a part of the name: programs that start others give them their environment, and so the name of the file.
pub(crate) fn create_capture(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    if !file.metadata()?.is_file() {
        return Ok(file);
    }
    match file.try_lock() {
        Ok(()) => file.set_len(0).map(|()| file),
        Err(TryLockError::WouldBlock) => {
            let mut name = path.file_stem().unwrap_or_default().to_owned();
            name.push(format!("-{}", std::process::id()));
            let other = path.with_file_name(name).with_extension(path.extension().unwrap_or_default());
            tracing::warn!(file = %path.display(), "another device writes this capture; writing {}", other.display());
            File::create(other)
        }
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// An interface whose frames are recorded. Time stamps are wall-clock nanoseconds; outgoing frames are recorded as
/// submitted. When a write fails, recording ends with a warning.
pub struct Tap {
    inner: Box<dyn Interface>,
    recording: Arc<Recording>,
    scratch: Vec<u8>,
}

/// Whether and where the [`Tap`]s of a device record. It may be switched while they are in use.
pub struct Recording {
    interface: String,
    active: AtomicBool,
    recorder: Mutex<Option<Recorder>>,
}

struct Recorder {
    file: PcapNgWriter<BufWriter<Box<dyn Write + Send>>>,
    flushed: SystemTime,
    /// Started by [`Recording::start_live`].
    live: bool,
}

impl Tap {
    /// Records the frames that cross `inner` while `recording` is on. Several taps may share a recording.
    pub fn new(inner: Box<dyn Interface>, recording: &Arc<Recording>) -> Self {
        Self { inner, recording: Arc::clone(recording), scratch: Vec::new() }
    }

    fn record(&mut self, direction: u32) {
        let mut recorder = lock(&self.recording.recorder);
        if let Some(running) = &mut *recorder
            && let Err(error) = running.record(&self.scratch, direction)
        {
            tracing::warn!(%error, "the frame tap stops");
            self.recording.active.store(false, Ordering::Relaxed);
            *recorder = None;
        }
    }

    fn record_received(&mut self, batch: &[RxFrame]) {
        if !self.recording.is_active() {
            return;
        }
        for frame in batch {
            self.scratch.clear();
            for piece in rx_pieces(&*self.inner, frame, 0, frame.len()) {
                self.scratch.extend_from_slice(piece);
            }
            self.record(INBOUND);
        }
    }
}

impl Recording {
    /// Records nothing until it is switched on.
    pub fn new(interface: String) -> Self {
        Self { interface, active: AtomicBool::new(false), recorder: Mutex::new(None) }
    }

    /// Records all frames from now on to `out`.
    pub fn start_file(&self, out: Box<dyn Write + Send>) -> io::Result<()> {
        self.start(out, false)
    }

    /// Records all frames from now on, until [`Self::stop_live`]. Fails when the device is already recorded.
    pub fn start_live(&self, out: Box<dyn Write + Send>) -> io::Result<()> {
        self.start(out, true)
    }

    /// Ends the recording that [`Self::start_live`] began.
    pub fn stop_live(&self) {
        let mut recorder = lock(&self.recorder);
        if recorder.as_ref().is_some_and(|running| running.live) {
            self.active.store(false, Ordering::Relaxed);
            *recorder = None;
        }
    }

    /// Writes the buffered bytes.
    pub fn flush(&self) {
        if let Some(running) = &mut *lock(&self.recorder)
            && let Err(error) = running.file.get_mut().flush()
        {
            tracing::debug!(%error, "flushing the frame tap");
        }
    }

    fn start(&self, out: Box<dyn Write + Send>, live: bool) -> io::Result<()> {
        let mut recorder = lock(&self.recorder);
        if recorder.is_some() {
            return Err(io::Error::other("the device is already recorded"));
        }
        let out = BufWriter::with_capacity(BUFFER_BYTES, out);
        let mut file = PcapNgWriter::new(out).map_err(io_error)?;
        file.write_pcapng_block(InterfaceDescriptionBlock {
            linktype: DataLink::ETHERNET,
            snaplen: 0,
            options: vec![
                InterfaceDescriptionOption::IfName(self.interface.clone().into()),
                // Time stamps count 10^-9 seconds.
                InterfaceDescriptionOption::IfTsResol(9),
            ],
        })
        .map_err(io_error)?;
        *recorder = Some(Recorder { file, flushed: wall_clock(), live });
        self.active.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }
}

impl Recorder {
    fn record(&mut self, frame: &[u8], direction: u32) -> Result<(), PcapError> {
        let now = wall_clock();
        self.file.write_pcapng_block(EnhancedPacketBlock {
            interface_id: 0,
            timestamp: now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
            original_len: frame.len() as u32,
            data: Cow::Borrowed(frame),
            options: vec![EnhancedPacketOption::Flags(direction)],
        })?;
        if now.duration_since(self.flushed).is_ok_and(|d| d > FLUSH_EVERY) {
            self.file.get_mut().flush().map_err(PcapError::IoError)?;
            self.flushed = now;
        }
        Ok(())
    }
}

#[expect(clippy::disallowed_methods, reason = "captures carry wall-clock time; the engine never sees it")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(e) => e,
        other => io::Error::other(other),
    }
}

impl Link for Tap {
    forward_link!(inner: chunk_bytes, offloads_checksums, is_within_host, tx_available, rx_capacity, rx_available, rx_chunks, rx_head,
        recycle, reassemble, alloc, tx_chunks_into, release, flush, steer, unsteer, hand_over);

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let before = batch.len();
        let received = self.inner.receive(batch, max);
        self.record_received(batch.get(before..).unwrap_or_default());
        received
    }

    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        if !self.recording.is_active() {
            return self.inner.submit(queue, frame, len);
        }
        self.scratch.clear();
        for chunk in self.inner.tx_chunks(frame).into_iter().flatten() {
            let wanted = chunk.len().min(len - self.scratch.len());
            self.scratch.extend_from_slice(chunk.get(..wanted).unwrap_or_default());
        }
        self.inner.submit(queue, frame, len)?;
        self.record(OUTBOUND);
        Ok(())
    }
}

impl Interface for Tap {
    forward_interface!(inner: attributes, readiness, resolver, kicker, change, next_hop, counters);
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::PoisonError;

    use pcap_file::pcapng::{Block, PcapNgReader};

    use super::*;
    use crate::sim::{self, WireConfig};

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn send(link: &mut dyn Link, bytes: &[u8]) {
        let mut frame = link.alloc(bytes.len()).expect("a free frame");
        link.tx_chunks(&mut frame).expect("idle").chunk_mut(0)[..bytes.len()].copy_from_slice(bytes);
        link.submit(QueueId(0), &mut frame, bytes.len()).expect("room");
        link.flush();
        link.release(frame);
    }

    #[test]
    fn both_directions_are_recorded_with_nanoseconds() {
        let (a, mut b) = sim::pair(WireConfig::default(), 1500).unwrap();
        let file = Output::default();
        let begin = wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let recording = Arc::new(Recording::new("sim1".into()));
        recording.start_file(Box::new(file.clone())).unwrap();
        let mut tap = Tap::new(Box::new(a), &recording);
        send(&mut tap, b"first, from us");
        send(&mut b, b"second, to us");
        let mut batch = Vec::new();
        assert_eq!(tap.receive(&mut batch, 8), 1);
        tap.recycle(batch.remove(0));
        recording.flush();
        let bytes = file.0.lock().unwrap().clone();
        let mut reader = PcapNgReader::new(&bytes[..]).unwrap();
        let mut packets = Vec::new();
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block.unwrap() {
                let now = wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap();
                assert!(begin <= packet.timestamp && packet.timestamp <= now);
                let direction = match packet.options[0] {
                    EnhancedPacketOption::Flags(flags) => flags,
                    _ => 0,
                };
                packets.push((direction, packet.data.to_vec()));
            }
        }
        assert_eq!(packets, [(OUTBOUND, b"first, from us".to_vec()), (INBOUND, b"second, to us".to_vec())]);
    }
}
