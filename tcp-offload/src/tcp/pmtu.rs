//! Path MTU discovery: the estimate for a path ([`PathMtu`], shared by its connections), and the outstanding probe of
//! one connection ([`Prober`]). RFC 1191, RFC 8201 and RFC 4821. Sizes are those of IP packets.
//!
//! A probe is a segment larger than the EMSS that is filled with whole FPDUs. When the probe alone is lost, that is no
//! sign of congestion: its bytes are cut into smaller segments at the TCP level and retransmitted, and the congestion
//! window is not reduced.

use std::time::Duration;

use crate::{seq::StreamOffset, time::Instant};

/// Settings of path MTU discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMtuConfig {
    /// Send probes to find out whether larger packets pass (RFC 4821). Routers' messages are always processed.
    pub probing: bool,
    /// Initial estimate for a new path, in bytes. `None` is the MTU of the interface: then probing begins only once the
    /// path has turned out narrower (RFC 4821 section 7.2).
    pub initial: Option<u16>,
    /// First fallback when all large packets are lost: a size in bytes that passes nearly everywhere. 1024 by RFC 4821
    /// section 7.2.
    pub base: u16,
    /// Time after a failed probe or a router's message until larger packets are tried again: 10 minutes by RFC 8201
    /// section 5.3, and never less than 5 (RFC 4821 section 7.3). [`Duration::MAX`] disables the retry.
    pub retry_after: Duration,
}

impl Default for PathMtuConfig {
    fn default() -> Self {
        Self { probing: true, initial: None, base: 1024, retry_after: Duration::from_mins(10) }
    }
}

/// Shortest time after which larger packets are tried again (RFC 4821 section 7.3).
const LEAST_RETRY: Duration = Duration::from_mins(5);

/// Common MTUs: tunnels over Ethernet, Ethernet, some jumbo frames (RFC 4821 section 7.3).
const COMMON: [u16; 11] = [1280, 1400, 1450, 1480, 1492, 1500, 2048, 4096, 4352, 8166, 9000];

/// The plateau table of RFC 1191 section 7.1, for routers that do not report their MTU.
const PLATEAUS: [u16; 9] = [32_000, 17_914, 8166, 4352, 2002, 1492, 1006, 508, 296];

/// The search has converged when the upper bound exceeds the size in use by at most this fraction of it: one sixteenth
/// (RFC 4821 section 7.3).
const CONVERGED: u16 = 16;

/// The estimate of a path's MTU (RFC 4821 section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMtu {
    /// MTU of the first hop.
    link: u16,
    /// Smallest MTU of any path: 68 (RFC 791) or 1280 (RFC 8200).
    floor: u16,
    /// `search_low`: packets of this size are known to pass.
    low: u16,
    /// `eff_pmtu`: largest size of packets that are not probes.
    effective: u16,
    /// `search_high`.
    high: u16,
    /// Whether `high` itself may pass: no packet of that size was lost yet.
    untried: bool,
    /// The time at which larger packets are tried again, because the path may have become wider (RFC 8201 section 5.3).
    retry_at: Option<Instant>,
}

impl PathMtu {
    /// The initial estimate for a path whose first hop has an MTU of `link` bytes.
    pub(crate) fn new(link: u16, v6: bool, config: &PathMtuConfig) -> Self {
        let floor = if v6 { 1280 } else { 68 };
        let effective = config.initial.map_or(link, |initial| initial.max(floor).min(link));
        let low = config.base.max(floor).min(effective);
        Self { link, floor, low, effective, high: link, untried: true, retry_at: None }
    }

    /// Largest packet that is not a probe, in bytes.
    pub fn bytes(&self) -> u16 {
        self.effective
    }

    /// Whether the estimate equals the MTU of the first hop, so that it need not be cached.
    pub(crate) fn is_plain(&self) -> bool {
        self.effective == self.link && self.high == self.link
    }

    /// The expiry of this estimate; `None` if never. `None` sorts as the oldest.
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// The same estimate with another expiry.
    #[cfg(test)]
    pub(crate) fn retried_at(self, at: Instant) -> Self {
        Self { retry_at: Some(at), ..self }
    }

    /// The same estimate for a connection whose first hop has an MTU of `link` bytes.
    pub(crate) fn over(mut self, link: u16) -> Self {
        self.link_changed(link);
        self
    }

    /// Sets the MTU of the first hop to `link` bytes. A path that was as wide as its first hop remains so.
    pub(super) fn link_changed(&mut self, link: u16) {
        let plain = self.is_plain();
        self.untried |= self.high == self.link;
        self.high = if self.high == self.link { link } else { self.high.min(link) };
        self.effective = if plain { link } else { self.effective.min(link) };
        self.low = self.low.min(self.effective);
        self.link = link;
    }

    /// Processes a router's report that it forwards at most `mtu` bytes (0: an old router that does not report its
    /// MTU). Returns false when the value is impossible or brings nothing new.
    pub(super) fn too_big(&mut self, now: Instant, mtu: u32, config: &PathMtuConfig) -> bool {
        let mtu = match mtu {
            0 => PLATEAUS.into_iter().find(|p| *p < self.effective).unwrap_or(self.effective),
            mtu => u16::try_from(mtu).unwrap_or(u16::MAX),
        };
        if mtu < self.floor || mtu >= self.high {
            return false;
        }
        (self.high, self.untried) = (mtu, true);
        self.effective = self.effective.min(mtu);
        self.low = self.low.min(mtu);
        self.retry_after(now, config);
        true
    }

    fn retry_after(&mut self, now: Instant, config: &PathMtuConfig) {
        self.retry_at =
            (config.retry_after != Duration::MAX).then(|| now + config.retry_after.max(LEAST_RETRY));
    }

    /// Records the delivery of a packet of this size: an implicit probe (RFC 4821 section 7.1).
    pub(super) fn delivered(&mut self, bytes: u16) {
        self.low = self.low.max(bytes.min(self.effective));
    }

    /// Whether a larger packet should be tried.
    pub(super) fn is_searching(&self, now: Instant) -> bool {
        // Nearly always false.
        self.effective < self.link
            && (self.effective < self.high
                && (self.untried || self.high - self.effective > self.effective / CONVERGED)
                || self.retry_at.is_some_and(|at| at <= now))
    }

    /// The size of the next probe, at most `limit`: the upper bound while it is untried, then the median of the common
    /// MTUs in the range, then the middle of the range.
    pub(super) fn probe_size(&mut self, now: Instant, limit: u16) -> Option<u16> {
        if self.retry_at.is_some_and(|at| at <= now) {
            (self.high, self.untried, self.retry_at) = (self.link, true, None);
        }
        let low = self.effective;
        let high = self.high.min(limit);
        if high <= low || !self.is_searching(now) {
            return None;
        }
        if self.untried {
            return Some(high);
        }
        let left = COMMON.iter().filter(|size| low < **size && **size <= high);
        let middle = left.clone().count() / 2;
        Some(left.copied().nth(middle).unwrap_or(low + (high - low).div_ceil(2)))
    }

    /// Raises the estimate after a probe of this size was delivered (RFC 4821 section 7.6.1).
    pub(super) fn probe_succeeded(&mut self, bytes: u16) {
        self.low = self.low.max(bytes);
        self.effective = self.effective.max(bytes);
        self.high = self.high.max(bytes);
        // A rest of fewer than 4 bytes is the padding of an FPDU: the bound itself counts as tried.
        self.untried &= self.high - self.effective >= 4;
    }

    /// Lowers the upper bound after a probe of this size alone was lost (section 7.6.2), or after a size that had been
    /// established was lost too often (section 7.8).
    pub(super) fn probe_failed(&mut self, now: Instant, bytes: u16, config: &PathMtuConfig) {
        self.high = self.high.min(bytes.saturating_sub(1)).max(self.floor);
        self.effective = self.effective.min(self.high);
        self.low = self.low.min(self.effective);
        self.untried = false;
        self.retry_after(now, config);
    }

    /// Falls back to smaller packets after a full-stop time-out (section 7.7); `step` counts those in a row, from 0.
    pub(super) fn black_hole(&mut self, step: u32, config: &PathMtuConfig) {
        self.low = match step {
            0 if self.effective > self.low => self.low,
            0 => self.low.min(config.base.max(self.floor)),
            _ => (self.effective / 2).max(self.floor),
        };
        self.effective = self.low;
        self.untried |= self.high == self.link;
    }
}

/// The state of a connection's probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Probe {
    #[default]
    None,
    /// In flight: its end offset, and the size of its packet.
    Sent { end: StreamOffset, size: u16 },
    /// Lost alone so far. Once everything sent before the loss was detected (up to `until`) is acknowledged, the probe
    /// counts as failed.
    Lost { until: StreamOffset, size: u16, by_timeout: bool },
}

/// The outcome of a probe, or of the size that a probe had established.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A packet of this size was delivered.
    Succeeded(u16),
    /// A packet of this size does not pass.
    Failed {
        size: u16,
        /// A time-out, not an ACK, detected the loss.
        by_timeout: bool,
    },
    /// Packets larger than this are lost too often (RFC 4821 section 7.8).
    Unreliable { above: u16 },
}

/// Counts losses among packets larger than before the last successful probe (RFC 4821 section 7.8).
#[derive(Debug, Clone, Copy)]
struct Watch {
    /// The packet size in use before, and the payload of its full segments.
    before: u16,
    above: u64,
    delivered: u32,
    lost: u32,
}

/// Packets after which a new size is first judged, and after which it is no longer watched.
const WATCH_LEAST: u32 = 20;
const WATCH_MOST: u32 = 1000;

/// The probes of one connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Prober {
    probe: Probe,
    /// No probe is sent before this time: probe losses, which congestion control ignores, must be rarer than congestion
    /// (section 7.6.2).
    not_before: Instant,
    watch: Option<Watch>,
    verdict: Option<Verdict>,
    /// Payload of the largest segment delivered since [`Prober::take_largest`].
    largest: u64,
}

impl Prober {
    /// Whether earlier probes allow a new one.
    pub(super) fn is_free(&self, now: Instant) -> bool {
        self.probe == Probe::None && now >= self.not_before
    }

    /// Records that a probe was sent.
    pub(super) fn sent(&mut self, end: StreamOffset, size: u16) {
        self.probe = Probe::Sent { end, size };
    }

    /// Whether the segment that ends at `end` is the probe.
    pub(super) fn is(&self, end: StreamOffset) -> bool {
        matches!(self.probe, Probe::Sent { end: at, .. } if at == end)
    }

    /// Records the delivery of a segment that was transmitted once.
    pub(super) fn delivered(&mut self, end: StreamOffset, bytes: u64) {
        self.largest = self.largest.max(bytes);
        if let Probe::Sent { end: at, size } = self.probe
            && at == end
        {
            self.probe = Probe::None;
            self.verdict = Some(Verdict::Succeeded(size));
        }
        self.count(bytes, false);
    }

    /// Records that a segment counts as lost.
    pub(super) fn lost(&mut self, bytes: u64) {
        self.count(bytes, true);
    }

    fn count(&mut self, bytes: u64, lost: bool) {
        let Some(watch) = self.watch.as_mut().filter(|w| bytes > w.above) else { return };
        watch.delivered += u32::from(!lost);
        watch.lost += u32::from(lost);
        let all = watch.delivered + watch.lost;
        if all >= WATCH_LEAST && watch.lost * 10 > all {
            self.verdict = Some(Verdict::Unreliable { above: watch.before });
            self.watch = None;
        } else if all >= WATCH_MOST {
            self.watch = None;
        }
    }

    /// Records that the probe alone was lost; `until` is `SND.NXT`.
    pub(super) fn lost_alone(&mut self, until: StreamOffset, by_timeout: bool) {
        if let Probe::Sent { size, .. } = self.probe {
            self.probe = Probe::Lost { until, size, by_timeout };
        }
    }

    /// Discards the probe because other segments are lost as well: the same size is tried again (section 7.6.4).
    pub(super) fn inconclusive(&mut self) {
        self.probe = Probe::None;
    }

    /// Decides a lost probe once `una` shows that everything sent until then is acknowledged.
    pub(super) fn acknowledged(&mut self, una: StreamOffset) {
        if let Probe::Lost { until, size, by_timeout } = self.probe
            && una >= until
        {
            self.probe = Probe::None;
            self.verdict = Some(Verdict::Failed { size, by_timeout });
        }
    }

    /// Sends no probe for the duration `pause`.
    pub(super) fn pause(&mut self, now: Instant, pause: Duration) {
        self.not_before = now + pause;
    }

    /// Starts to count losses among segments with more payload than `above`, after larger packets were allowed.
    pub(super) fn watch(&mut self, before: u16, above: u64) {
        self.watch.get_or_insert(Watch { before, above, delivered: 0, lost: 0 });
    }

    pub(super) fn take_verdict(&mut self) -> Option<Verdict> {
        self.verdict.take()
    }

    pub(super) fn take_largest(&mut self) -> u64 {
        std::mem::take(&mut self.largest)
    }
}

#[cfg(test)]
mod tests;
