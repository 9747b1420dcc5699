//! Resource limits of one user, and the rate of requests.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

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
    /// Of all users together.
    pub all_devices: usize,
    pub all_memory_bytes: u64,
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
        // Each device that is still being removed keeps kernel memory, and time of the thread that removes pairs.
        let most_bytes = most.saturating_mul(WITH_REMOVED as u64);
        if usage.slots >= devices.saturating_mul(WITH_REMOVED)
            || memory_bytes > most_bytes.saturating_sub(usage.slots_bytes)
        {
            let text = "too many devices of this user are still being removed: open one later".to_owned();
            return Err(Refusal { reason: Reason::Rate, text });
        }
        Ok(())
    }

    /// Whether all users together, with `all` in use, may have one more device with `memory_bytes` of frame memory.
    pub(crate) fn all_devices(&self, all: &Usage, memory_bytes: u64) -> Result<(), Refusal> {
        if all.slots >= self.all_devices {
            let most = self.all_devices;
            return refuse(format!("all users together have {most} devices already (--devices of xwarpd)"));
        }
        if memory_bytes > self.all_memory_bytes.saturating_sub(all.slots_bytes) {
            let [wanted, had, most] =
                [memory_bytes, all.slots_bytes, self.all_memory_bytes].map(|bytes| bytes >> 20);
            return refuse(format!(
                "{wanted} MiB of frame memory: all users together have {had} of {most} MiB already (--memory of xwarpd)"
            ));
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

/// Seconds of requests that a user may send at once.
const BURST_SECONDS: f64 = 2.0;
/// Requests, as a share of a second's, for which a user's clients wait together, so that they do not take turns one by one.
const RESUME_SECONDS: f64 = 0.01;

/// A token bucket of requests for each user, which fills at the rate. Requests beyond it wait in the sockets of the user's
/// clients, and are not read.
#[derive(Debug)]
pub(crate) struct Rates {
    per_second: f64,
    users: BTreeMap<u32, Bucket>,
}

#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Rates {
    pub(crate) fn new(per_second: u32) -> Self {
        Self { per_second: f64::from(per_second), users: BTreeMap::new() }
    }

    fn most(&self) -> f64 {
        (self.per_second * BURST_SECONDS).max(1.0)
    }

    /// Whether a request of `uid` may be read now; otherwise the time until it may.
    pub(crate) fn ready(&self, uid: u32, now: Instant) -> Result<(), Duration> {
        self.has(uid, 1.0, now)
    }

    /// Whether the clients of `uid` may be read again, after they had to wait; otherwise the time until they may.
    pub(crate) fn resumes(&self, uid: u32, now: Instant) -> Result<(), Duration> {
        self.has(uid, (self.per_second * RESUME_SECONDS).max(1.0), now)
    }

    fn has(&self, uid: u32, tokens: f64, now: Instant) -> Result<(), Duration> {
        let Some(bucket) = self.users.get(&uid) else { return Ok(()) };
        let missing = tokens - bucket.filled(self.per_second, self.most(), now);
        if missing <= 0.0 { Ok(()) } else { Err(Duration::from_secs_f64(missing / self.per_second)) }
    }

    /// Takes one request of `uid` out of its bucket.
    pub(crate) fn spend(&mut self, uid: u32, now: Instant) {
        let (per_second, most) = (self.per_second, self.most());
        let bucket = self.users.entry(uid).or_insert(Bucket { left: most, at: now });
        *bucket = Bucket { left: bucket.filled(per_second, most, now) - 1.0, at: now };
    }

    /// Removes the buckets that are full again. A disconnected user keeps a bucket that is not full; otherwise a new
    /// connection would start with a full one.
    pub(crate) fn forget_full(&mut self, now: Instant) {
        let (per_second, most) = (self.per_second, self.most());
        self.users.retain(|_, bucket| bucket.filled(per_second, most, now) < most);
    }
}

impl Bucket {
    /// Tokens in the bucket now.
    fn filled(&self, per_second: f64, most: f64, now: Instant) -> f64 {
        (self.left + now.saturating_duration_since(self.at).as_secs_f64() * per_second).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_fills_at_its_rate_and_holds_a_burst() {
        let mut rates = Rates::new(10);
        let start = Instant::now();
        let mut taken = |at: Duration| {
            let now = start + at;
            let taken = (0..1000).take_while(|_| {
                let ready = rates.ready(7, now).is_ok();
                if ready {
                    rates.spend(7, now);
                }
                ready
            });
            taken.count()
        };
        assert_eq!(taken(Duration::ZERO), 20);
        assert_eq!(taken(Duration::from_millis(550)), 5);
        assert_eq!(taken(Duration::from_secs(60)), 20);
        assert!(rates.ready(8, start).is_ok(), "users are independent");
    }

    /// What is over the rate waits for a time that is known, and is not refused.
    #[test]
    fn attack_requests_over_the_rate_wait() {
        let mut rates = Rates::new(10);
        let start = Instant::now();
        while rates.ready(7, start).is_ok() {
            rates.spend(7, start);
        }
        let wait = rates.resumes(7, start).unwrap_err();
        assert!(wait <= Duration::from_millis(101), "{wait:?}");
        assert_eq!(rates.resumes(7, start + wait + Duration::from_millis(1)), Ok(()));
    }

    #[test]
    fn a_bucket_is_kept_until_it_is_full_again() {
        let mut rates = Rates::new(10);
        let start = Instant::now();
        rates.spend(7, start);
        rates.forget_full(start + Duration::from_millis(50));
        assert_eq!(rates.users.len(), 1, "the bucket was forgotten");
        rates.forget_full(start + Duration::from_secs(1));
        assert!(rates.users.is_empty(), "a full bucket is kept");
    }

    const LIMITS: Limits = Limits {
        devices: 2,
        ports: 1,
        memory_bytes: 8192,
        requests_per_second: 1,
        all_devices: 3,
        all_memory_bytes: 16384,
    };

    #[test]
    fn limits_are_refused_at_their_value_and_not_before() {
        let usage = |devices, memory_bytes| Usage { devices, memory_bytes, ..Usage::default() };
        assert_eq!(LIMITS.device(&usage(1, 4096), 4096), Ok(()));
        assert_eq!(LIMITS.device(&usage(2, 0), 1).unwrap_err().reason, Reason::Limit);
        assert_eq!(LIMITS.device(&usage(1, 4096), 4097).unwrap_err().reason, Reason::Limit);
        assert_eq!(LIMITS.device(&usage(0, 0), u64::MAX).unwrap_err().reason, Reason::Limit);
        let removing = |slots, slots_bytes| Usage { slots, slots_bytes, ..Usage::default() };
        assert_eq!(LIMITS.device(&removing(3, 12288), 4096), Ok(()));
        assert_eq!(LIMITS.device(&removing(4, 0), 1).unwrap_err().reason, Reason::Rate);
        assert_eq!(LIMITS.device(&removing(3, 12288), 4097).unwrap_err().reason, Reason::Rate);
        assert_eq!(LIMITS.port(&Usage::default()), Ok(()));
        assert_eq!(LIMITS.port(&Usage { ports: 1, ..Usage::default() }).unwrap_err().reason, Reason::Limit);
    }

    /// One person may have many users (subordinate IDs), so there are limits for all of them together.
    #[test]
    fn attack_all_users_together_have_limits() {
        let all = |slots, slots_bytes| Usage { slots, slots_bytes, ..Usage::default() };
        assert_eq!(LIMITS.all_devices(&all(2, 8192), 8192), Ok(()));
        assert!(LIMITS.all_devices(&all(3, 0), 1).unwrap_err().text.contains("--devices"));
        assert!(LIMITS.all_devices(&all(2, 8193), 8192).unwrap_err().text.contains("--memory"));
    }
}
