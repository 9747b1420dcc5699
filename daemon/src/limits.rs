//! Resource limits of one user, and the rate of requests.

use std::collections::BTreeMap;
use std::time::Instant;

use xwarp_control::{Reason, Refusal};

/// Connections beyond the devices that a user may have.
const SPARE_CONNECTIONS: usize = 16;

/// Devices that are being removed may use as much as open ones.
const WITH_REMOVED: usize = 2;

/// The resources that one user (uid) may hold at a time. Root is limited too, because programs of root may leak as
/// well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub devices: usize,
    pub ports: usize,
    pub memory_bytes: u64,
    pub requests_per_second: u32,
}

/// The resources in use by one user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Usage {
    pub connections: usize,
    /// Open devices and devices that are being opened.
    pub devices: usize,
    pub ports: usize,
    pub memory_bytes: u64,
    /// Devices in the kernel: open ones, and those that are being opened or removed.
    pub slots: usize,
    /// Frame memory of all of them.
    pub slots_bytes: u64,
}

fn refuse(text: String) -> Result<(), Refusal> {
    Err(Refusal { reason: Reason::Limit, text })
}

impl Limits {
    pub(crate) fn most_connections(&self) -> usize {
        self.devices + SPARE_CONNECTIONS
    }

    /// Whether a user with `usage` may open a device with `memory_bytes` of frame memory.
    pub(crate) fn device(&self, usage: &Usage, memory_bytes: u64) -> Result<(), Refusal> {
        let Self { devices, memory_bytes: most, .. } = *self;
        if usage.devices >= devices {
            return refuse(format!("this user has {devices} devices already (--devices-per-user of xwarpd)"));
        }
        if memory_bytes > most.saturating_sub(usage.memory_bytes) {
            let [wanted, had, most] = [memory_bytes, usage.memory_bytes, most].map(|bytes| bytes >> 10);
            return refuse(format!(
                "{wanted} KiB of frame memory: this user has {had} of {most} KiB already (--memory-per-user of xwarpd, or fewer chunks)"
            ));
        }
        // The worker that creates and removes pairs serves all users in order, so one user must not fill its queue.
        let most_bytes = most.saturating_mul(WITH_REMOVED as u64);
        if usage.slots >= devices.saturating_mul(WITH_REMOVED)
            || memory_bytes > most_bytes.saturating_sub(usage.slots_bytes)
        {
            return refuse(
                "too many devices of this user are still being removed: open one later".to_owned(),
            );
        }
        Ok(())
    }

    /// Whether a user with `usage` may reserve a port.
    pub(crate) fn port(&self, usage: &Usage) -> Result<(), Refusal> {
        if usage.ports >= self.ports {
            let most = self.ports;
            return refuse(format!("this user has {most} ports already (--ports-per-user of xwarpd)"));
        }
        Ok(())
    }
}

/// A token bucket of requests for each user, which fills at the rate and holds one second's requests.
#[derive(Debug, Default)]
pub(crate) struct Rates(BTreeMap<u32, Bucket>);

#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Rates {
    /// Takes one request of `uid` out of its bucket.
    pub(crate) fn spend(&mut self, uid: u32, per_second: u32, now: Instant) -> Result<(), Refusal> {
        let most = f64::from(per_second);
        let bucket = self.0.entry(uid).or_insert(Bucket { left: most, at: now });
        *bucket = Bucket { left: bucket.filled(most, now), at: now };
        if bucket.left < 1.0 {
            let text = format!(
                "this user sends more than {per_second} requests in a second (--requests-per-second of xwarpd)"
            );
            return Err(Refusal { reason: Reason::Rate, text });
        }
        bucket.left -= 1.0;
        Ok(())
    }

    /// Removes the buckets that are full again. A disconnected user keeps a bucket that is not full; otherwise a new
    /// connection would start with a full one.
    pub(crate) fn forget_full(&mut self, per_second: u32, now: Instant) {
        let most = f64::from(per_second);
        self.0.retain(|_, bucket| bucket.filled(most, now) < most);
    }
}

impl Bucket {
    /// Tokens in the bucket now.
    fn filled(&self, most: f64, now: Instant) -> f64 {
        (self.left + now.saturating_duration_since(self.at).as_secs_f64() * most).min(most)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bucket_fills_at_its_rate_and_holds_one_second() {
        let mut rates = Rates::default();
        let start = Instant::now();
        let mut taken = |at: Duration| (0..1000).filter(|_| rates.spend(7, 10, start + at).is_ok()).count();
        assert_eq!(taken(Duration::ZERO), 10);
        assert_eq!(taken(Duration::from_millis(550)), 5);
        assert_eq!(taken(Duration::from_secs(60)), 10);
        assert!(rates.spend(8, 10, start).is_ok(), "users are independent");
    }

    #[test]
    fn a_bucket_is_kept_until_it_is_full_again() {
        let mut rates = Rates::default();
        let start = Instant::now();
        while rates.spend(7, 10, start).is_ok() {}
        let soon = start + Duration::from_millis(550);
        rates.forget_full(10, soon);
        assert_eq!(
            (0..10).filter(|_| rates.spend(7, 10, soon).is_ok()).count(),
            5,
            "the bucket was forgotten"
        );
        rates.forget_full(10, soon + Duration::from_secs(1));
        assert!(rates.0.is_empty(), "a full bucket is kept");
    }

    #[test]
    fn limits_are_refused_at_their_value_and_not_before() {
        let limits = Limits { devices: 2, ports: 1, memory_bytes: 8192, requests_per_second: 1 };
        let usage = |devices, memory_bytes| Usage { devices, memory_bytes, ..Usage::default() };
        assert_eq!(limits.device(&usage(1, 4096), 4096), Ok(()));
        assert_eq!(limits.device(&usage(2, 0), 1).unwrap_err().reason, Reason::Limit);
        assert_eq!(limits.device(&usage(1, 4096), 4097).unwrap_err().reason, Reason::Limit);
        assert_eq!(limits.device(&usage(0, 0), u64::MAX).unwrap_err().reason, Reason::Limit);
        let removing = |slots, slots_bytes| Usage { slots, slots_bytes, ..Usage::default() };
        assert_eq!(limits.device(&removing(3, 12288), 4096), Ok(()));
        assert_eq!(limits.device(&removing(4, 0), 1).unwrap_err().reason, Reason::Limit);
        assert_eq!(limits.device(&removing(3, 12288), 4097).unwrap_err().reason, Reason::Limit);
        assert_eq!(limits.port(&Usage::default()), Ok(()));
        assert_eq!(limits.port(&Usage { ports: 1, ..Usage::default() }).unwrap_err().reason, Reason::Limit);
    }
}
