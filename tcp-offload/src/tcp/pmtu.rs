//! Path MTU discovery: what is known of a path ([`PathMtu`], shared by its connections), and the probe that one
//! connection may have under way ([`Prober`]). RFC 1191, RFC 8201 and RFC 4821; sizes are those of IP packets.
//!
//! A probe is a segment larger than the rest that whole FPDUs fill. When it alone is lost, that is no sign of congestion:
//! its bytes are cut anew at the TCP level and sent again, and the window stays.

use std::time::Duration;

use crate::{seq::StreamOffset, time::Instant};

/// How the MTU of paths is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMtuConfig {
    /// Look for larger packets with probes (RFC 4821). Routers' messages are heeded all the same.
    pub probing: bool,
    /// Largest packet sent before anything is known of a path, in bytes; `None` is what the interface carries: then
    /// probing begins only once the path has turned out narrower (RFC 4821 section 7.2).
    pub initial: Option<u16>,
    /// A packet of this many bytes passes nearly everywhere: what is fallen back to first when all packets vanish. 1024 by
    /// RFC 4821 section 7.2.
    pub base: u16,
    /// How long after a failed probe or a router's message larger packets are tried again: 10 minutes by RFC 8201
    /// section 5.3, and never below 5 (RFC 4821 section 7.3). [`Duration::MAX`] never tries.
    pub retry_after: Duration,
}

impl Default for PathMtuConfig {
    fn default() -> Self {
        Self { probing: true, initial: None, base: 1024, retry_after: Duration::from_mins(10) }
    }
}

/// Shortest time after which larger packets are tried again (RFC 4821 section 7.3).
const LEAST_RETRY: Duration = Duration::from_mins(5);

/// MTUs that there are: tunnels over Ethernet, Ethernet, some jumbo frames (RFC 4821 section 7.3).
const COMMON: [u16; 11] = [1280, 1400, 1450, 1480, 1492, 1500, 2048, 4096, 4352, 8166, 9000];

/// RFC 1191 section 7.1, for routers that do not say their MTU.
const PLATEAUS: [u16; 9] = [32_000, 17_914, 8166, 4352, 2002, 1492, 1006, 508, 296];

/// The search has converged when the size in use is within this part of the bound (RFC 4821 section 7.3).
const CONVERGED: u16 = 16;

/// The MTU of a path as far as it is known (RFC 4821 section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMtu {
    /// What the first hop carries.
    link: u16,
    /// No path has less: 68 (RFC 791), 1280 (RFC 8200).
    floor: u16,
    /// `search_low`: packets of this size are known to pass.
    low: u16,
    /// `eff_pmtu`: packets that are no probes have this size at most.
    effective: u16,
    /// `search_high`.
    high: u16,
    /// Whether `high` itself may pass: nothing of that size was lost yet.
    untried: bool,
    /// When the path may be believed to have become wider (RFC 8201 section 5.3).
    retry_at: Option<Instant>,
}

impl PathMtu {
    /// Of a path whose first hop carries `link` bytes.
    pub(crate) fn new(link: u16, v6: bool, config: &PathMtuConfig) -> Self {
        let floor = if v6 { 1280 } else { 68 };
        let effective = config.initial.map_or(link, |initial| initial.max(floor).min(link));
        let low = config.base.max(floor).min(effective);
        Self { link, floor, low, effective, high: link, untried: true, retry_at: None }
    }

    /// Bytes of the largest packet that is no probe.
    pub fn bytes(&self) -> u16 {
        self.effective
    }

    /// Whether the path carries what its first hop does, for all that is known: nothing that would be worth remembering.
    pub(crate) fn is_plain(&self) -> bool {
        self.effective == self.link && self.high == self.link
    }

    /// When this estimate ages; what never does is the oldest.
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// The same estimate, made at another time.
    #[cfg(test)]
    pub(crate) fn retried_at(self, at: Instant) -> Self {
        Self { retry_at: Some(at), ..self }
    }

    /// The same path, seen from a connection whose first hop carries `link` bytes.
    pub(crate) fn over(mut self, link: u16) -> Self {
        self.link_changed(link);
        self
    }

    /// The first hop carries `link` bytes from now on. A path that was as wide as its first hop remains so.
    pub(super) fn link_changed(&mut self, link: u16) {
        let plain = self.is_plain();
        self.untried |= self.high == self.link;
        self.high = if self.high == self.link { link } else { self.high.min(link) };
        self.effective = if plain { link } else { self.effective.min(link) };
        self.low = self.low.min(self.effective);
        self.link = link;
    }

    /// A router says that it passes on no more than `mtu` bytes (0: an old router that does not say). Returns false for
    /// what cannot be or says nothing new.
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

    /// A segment in a packet of this size was delivered: an implicit probe (RFC 4821 section 7.1).
    pub(super) fn delivered(&mut self, bytes: u16) {
        self.low = self.low.max(bytes.min(self.effective));
    }

    /// Whether a larger packet is worth a try.
    pub(super) fn is_searching(&self, now: Instant) -> bool {
        self.effective < self.high
            && (self.untried || self.high - self.effective > self.effective / CONVERGED)
            || self.effective < self.link && self.retry_at.is_some_and(|at| at <= now)
    }

    /// The size of the next probe, at most `limit`: the bound while that may pass, then the middle one of the common MTUs
    /// that are left, then the middle.
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

    /// A probe of this size has come through (RFC 4821 section 7.6.1).
    pub(super) fn probe_succeeded(&mut self, bytes: u16) {
        self.low = self.low.max(bytes);
        self.effective = self.effective.max(bytes);
        self.high = self.high.max(bytes);
        // What is left of the bound is less than the pad of an FPDU.
        self.untried &= self.high - self.effective >= 4;
    }

    /// A probe of this size was lost, and nothing else (section 7.6.2). The same holds for a size that came through once
    /// and then did not (section 7.8).
    pub(super) fn probe_failed(&mut self, now: Instant, bytes: u16, config: &PathMtuConfig) {
        self.high = self.high.min(bytes.saturating_sub(1)).max(self.floor);
        self.effective = self.effective.min(self.high);
        self.low = self.low.min(self.effective);
        self.untried = false;
        self.retry_after(now, config);
    }

    /// Nothing comes through any more (section 7.7): the `step`th time-out in a row that says so, from 0.
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

/// Where the probe of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Probe {
    #[default]
    None,
    /// Under way: where it ends, and the size of its packet.
    Sent { end: StreamOffset, size: u16 },
    /// Lost, and nothing else so far. What was sent before that was known ends at `until`: once it is acknowledged, the
    /// probe counts as failed.
    Lost { until: StreamOffset, size: u16, by_timeout: bool },
}

/// How a probe ended, or a size that a probe had established.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A packet of this size has come through.
    Succeeded(u16),
    /// A packet of this size does not.
    Failed {
        size: u16,
        /// Only a time-out told.
        by_timeout: bool,
    },
    /// Packets larger than this are lost too often (RFC 4821 section 7.8).
    Unreliable { above: u16 },
}

/// Losses among the packets that only the last success allows (RFC 4821 section 7.8).
#[derive(Debug, Clone, Copy)]
struct Watch {
    /// The size in use before, and the payload of its full segments.
    before: u16,
    above: u64,
    delivered: u32,
    lost: u32,
}

/// Packets after which a size is judged, and after which it is no longer watched.
const WATCH_LEAST: u32 = 20;
const WATCH_MOST: u32 = 1000;

/// The probes of one connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Prober {
    probe: Probe,
    /// No probe before this: suppressed congestion control must be rarer than congestion (section 7.6.2).
    not_before: Instant,
    watch: Option<Watch>,
    verdict: Option<Verdict>,
    /// Payload of the largest segment delivered since [`Prober::take_largest`].
    largest: u64,
}

impl Prober {
    /// Whether a probe may be sent, as far as earlier probes decide.
    pub(super) fn is_free(&self, now: Instant) -> bool {
        self.probe == Probe::None && now >= self.not_before
    }

    /// A probe was sent.
    pub(super) fn sent(&mut self, end: StreamOffset, size: u16) {
        self.probe = Probe::Sent { end, size };
    }

    /// Whether the segment that ends at `end` is the probe.
    pub(super) fn is(&self, end: StreamOffset) -> bool {
        matches!(self.probe, Probe::Sent { end: at, .. } if at == end)
    }

    /// A segment was delivered, after one transmission.
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

    /// A segment counts as lost.
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

    /// The probe alone was lost; `until` is `SND.NXT`.
    pub(super) fn lost_alone(&mut self, until: StreamOffset, by_timeout: bool) {
        if let Probe::Sent { size, .. } = self.probe {
            self.probe = Probe::Lost { until, size, by_timeout };
        }
    }

    /// Other segments are lost as well: nothing is learnt, and the same size is tried again (section 7.6.4).
    pub(super) fn inconclusive(&mut self) {
        self.probe = Probe::None;
    }

    /// Everything before `una` is acknowledged.
    pub(super) fn acknowledged(&mut self, una: StreamOffset) {
        if let Probe::Lost { until, size, by_timeout } = self.probe
            && una >= until
        {
            self.probe = Probe::None;
            self.verdict = Some(Verdict::Failed { size, by_timeout });
        }
    }

    /// No probe for this long.
    pub(super) fn pause(&mut self, now: Instant, pause: Duration) {
        self.not_before = now + pause;
    }

    /// Larger packets than before are sent: segments with more payload than `above` are watched.
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
