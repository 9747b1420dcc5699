//! [`TcpConfig`]: the settings of a connection, with the reason for each default.

use std::{fmt, str::FromStr, time::Duration};

use super::{PathMtuConfig, timers::TICK};
use crate::wire::HOP_LIMIT;

/// Largest receive window (RFC 7323 section 2.3).
const MAX_WINDOW: u32 = 1 << 30;

/// Upper limit of all configured retransmission time-outs and of the allowance for delayed ACKs: one day, so that their
/// sums cannot overflow.
const MAX_TIMEOUT: Duration = Duration::from_hours(24);

/// Longest delay of an ACK: less than 0.5 s (RFC 9293 section 3.8.6.3).
const MAX_ACK_DELAY: Duration = Duration::from_millis(499);

/// The congestion control of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// RFC 5681 and 6582.
    NewReno,
    /// RFC 9438, with HyStart++ (RFC 9406) in slow start.
    #[default]
    Cubic,
    /// RFC 8257, for networks whose switches mark early and whose hosts all run it. Needs ECN.
    Dctcp,
    /// BBR, version 3 (draft-ietf-ccwg-bbr-06), for paths that lose segments without congestion. It paces, so its segments
    /// leave by a timer.
    Bbr,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::NewReno, Self::Cubic, Self::Dctcp, Self::Bbr];

    /// The name that the kernel has for it (`TCP_CONGESTION`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::NewReno => "reno",
            Self::Cubic => "cubic",
            Self::Dctcp => "dctcp",
            Self::Bbr => "bbr",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is none of a congestion control.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no congestion control has this name: there are reno, cubic, dctcp and bbr")]
pub struct UnknownAlgorithm;

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Self, UnknownAlgorithm> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or(UnknownAlgorithm)
    }
}

/// Keepalive times (RFC 9293 section 3.8.4).
///
/// A probe also shows its receiver that the prober is alive, and the end that accepted the connection waits one
/// `interval` longer before its first probe. Therefore only the initiator probes an idle connection, as long as the
/// initiator is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe of the end that opened the connection.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Probes without an answer before the connection counts as dead.
    pub probes: u32,
}

/// Settings of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpConfig {
    /// The initial receive window in bytes: at most 2^30 (RFC 7323 section 2.3), and no more than the link's receive
    /// frames can hold at once. 1 MiB is what 8 Gbit/s send in a millisecond.
    pub receive_window: u32,
    /// Upper limit of the receive window in bytes. On long paths the window grows to four times what arrives in a round
    /// trip. Such a flight never arrives all at once, so the number of the link's frames does not limit it.
    pub receive_window_max: u32,
    /// Congestion control.
    pub algorithm: Algorithm,
    /// Initial window, in segments. 10 by RFC 6928.
    pub initial_window: u32,
    /// Offer window scaling (RFC 7323 section 2).
    pub window_scaling: bool,
    /// Offer timestamps (RFC 7323 section 3).
    pub timestamps: bool,
    /// Offer SACK (RFC 2018).
    pub sack: bool,
    /// Offer ECN (RFC 3168).
    pub ecn: bool,
    /// Retransmission time-out before the first measurement: 1 s (RFC 6298 section 2.1).
    pub rto_initial: Duration,
    /// The least difference between the retransmission time-out and the smoothed round-trip time. RFC 6298 section 2.4
    /// sets a minimum of 1 s for the time-out, for clocks of 500 ms. The difference must cover the peer's delayed ACK
    /// (40 to 200 ms in Linux, our interop peer) on paths of any length: 200 ms, as in Linux. Tail losses are repaired
    /// earlier: the tail loss probe of RFC 8985 is sent after two round trips.
    pub rto_min: Duration,
    /// Largest retransmission time-out: 60 s, the smallest maximum that RFC 6298 section 2.5 allows.
    pub rto_max: Duration,
    /// Initial allowance of a tail loss probe for the peer's delayed ACK (RFC 8985 section 7.2): 2 ms, twice our own
    /// delay. When the peer delays longer (Linux: 40 ms), the connection adapts: each spurious probe doubles the
    /// allowance.
    pub tlp_ack_delay: Duration,
    /// Longest time that an ACK waits for data to carry it. RFC 9293 section 3.8.6.3 allows 500 ms. 1 ms, because round
    /// trips here are microseconds, and a sender with a small window must not wait long.
    pub delayed_ack: Duration,
    /// Longest time that the ACK of a single segment that is not full waits for the application's answer to carry it, also when
    /// the engine is idle; `None`: an idle turn sends this ACK. It delays the completion of the peer's sends, so it is for
    /// protocols that do not wait for it. A peer's tail loss probes adapt to it, as they do to Linux's delayed ACKs.
    pub answer_delay: Option<Duration>,
    /// Full segments after which an ACK is sent at once, except while the peer's congestion window may be small: then 2, as
    /// RFC 5681 section 4.2 recommends. 16, because an ACK frame costs a third as much as a data frame, and senders count
    /// bytes (RFC 3465).
    pub ack_every: u32,
    /// Longest time that an ACK waits for further segments of a peer that has more to send, while the application
    /// polls; at most `delayed_ack`. 50 us: a few times what 16 segments take.
    pub ack_hold: Duration,
    /// Time limit of a connection attempt.
    pub connect_timeout: Duration,
    /// Largest number of SYN-ACKs sent for one SYN that gets no answer. 4: at once and after 1, 3 and 7 s (RFC 6298
    /// section 2.1 and rule 5.5). No more, because any host can make us spend memory on half-open connections.
    pub syn_acks: u32,
    /// Time that a half-open connection waits for the ACK of its SYN-ACK. RFC 9293 section 3.8.3 (MUST-23) asks for 3
    /// minutes; to meet it, raise `syn_acks` as well.
    pub syn_ack_timeout: Duration,
    /// The user timeout of RFC 9293 section 3.9.1: the connection ends when data stays unacknowledged for this long, or
    /// a closed window is probed for this long without an answer.
    pub user_timeout: Duration,
    /// Keepalive (RFC 9293 section 3.8.4): the first probe after 15 s of silence, then one every 3 s, five in all, so
    /// that a dead peer is detected after 30 s (33 s at the end that accepted the connection). `None` turns keepalive
    /// off: a queue pair that only waits for receives then never detects that its peer is gone. RFC 9293 wants
    /// keepalive off by default; `docs/decisions/0013-keepalive-is-on-by-default.md` has the reasons for our default.
    pub keepalive: Option<Keepalive>,
    /// Shortest TIME-WAIT. RFC 9293 section 3.4.2 says 2 MSL = 4 minutes for the whole Internet. In a data centre a
    /// frame lives for some milliseconds at most, and timestamps or the rule of RFC 6191 protect a new incarnation. 1 s
    /// lets a peer whose time-out is 200 ms send its FIN three times. When the time-out is longer, or the peer has
    /// backed off, TIME-WAIT lasts for three of the peer's time-outs, up to a minute.
    pub time_wait: Duration,
    /// Duration of FIN-WAIT-2 while the peer sends nothing: 60 s, so that a peer that never closes does not keep a
    /// connection indefinitely (RFC 9293 section 3.6.1 sets no limit). When the local end no longer reads, this limits
    /// the whole close, whatever the peer sends.
    pub fin_wait_2: Duration,
    /// Path MTU discovery.
    pub path_mtu: PathMtuConfig,
    /// Differentiated Services codepoint of all packets, 0 to 63 (RFC 9293 section 3.9.1.9).
    pub dscp: u8,
    /// TTL or hop limit of all packets (RFC 9293 section 3.9.2).
    pub hop_limit: u8,
    /// Largest number of challenge ACKs sent in one `challenge_period` (RFC 5961 section 7).
    pub challenges: u32,
    /// The period to which `challenges` applies.
    pub challenge_period: Duration,
    /// Largest number of transmit chunks that this connection may retain. It also never retains more than four times
    /// the number of free chunks, so that other connections find some. The last frame may exceed the limit.
    pub max_chunks: u32,
    /// Free transmit chunks reserved for ACKs and retransmissions of all connections, which new data does not use; at
    /// least the chunks of two full segments.
    pub reserve_chunks: u32,
}

/// Settings that can be changed while a connection is open (RFC 9293 sections 3.8.3, 3.8.4, 3.9.1.9 and 3.9.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// See [`TcpConfig::user_timeout`].
    pub user_timeout: Duration,
    /// See [`TcpConfig::keepalive`].
    pub keepalive: Option<Keepalive>,
    /// See [`TcpConfig::dscp`].
    pub dscp: u8,
    /// See [`TcpConfig::hop_limit`].
    pub hop_limit: u8,
    /// See [`TcpConfig::answer_delay`].
    pub answer_delay: Option<Duration>,
    /// See [`TcpConfig::algorithm`]. [`Algorithm::Dctcp`] is negotiated with the SYN: an open connection neither begins nor
    /// ceases to use it.
    pub algorithm: Algorithm,
}

impl Default for Keepalive {
    /// See [`TcpConfig::keepalive`].
    fn default() -> Self {
        Self { idle: Duration::from_secs(15), interval: Duration::from_secs(3), probes: 5 }
    }
}

impl Keepalive {
    /// Silence before the first probe. The end that accepted the connection (`passive`) waits one interval longer.
    pub(super) fn first_probe(&self, passive: bool) -> Duration {
        if passive { self.idle.saturating_add(self.interval) } else { self.idle }
    }

    /// The same settings with times of at least one tick and at least one probe (RFC 9293 section 3.8.4, MUST-29).
    fn clamped(self) -> Self {
        let Self { idle, interval, probes } = self;
        Self { idle: idle.max(TICK), interval: interval.max(TICK), probes: probes.max(1) }
    }
}

impl Tuning {
    /// The same settings with values out of range replaced by the nearest valid ones: every timer runs for at least one
    /// tick.
    #[must_use]
    pub fn clamped(self) -> Self {
        Self {
            user_timeout: self.user_timeout.max(TICK),
            keepalive: self.keepalive.map(Keepalive::clamped),
            dscp: self.dscp & 0x3f,
            hop_limit: self.hop_limit.max(1),
            answer_delay: self.answer_delay.map(|delay| delay.clamp(TICK, MAX_ACK_DELAY)),
            algorithm: self.algorithm,
        }
    }
}

impl TcpConfig {
    /// The same settings with values out of range replaced by the nearest valid ones: every timer runs for at least one
    /// tick, a time-out for at most a day, and a connection can always send a segment.
    #[must_use]
    pub fn clamped(self) -> Self {
        let tuning = self.tuning().clamped();
        let rto_min = self.rto_min.clamp(TICK, MAX_TIMEOUT);
        let delayed_ack = self.delayed_ack.min(MAX_ACK_DELAY);
        let mut clamped = Self {
            initial_window: self.initial_window.max(1),
            rto_initial: self.rto_initial.clamp(TICK, MAX_TIMEOUT),
            rto_min,
            rto_max: self.rto_max.clamp(rto_min, MAX_TIMEOUT),
            tlp_ack_delay: self.tlp_ack_delay.min(MAX_TIMEOUT),
            delayed_ack,
            ack_hold: self.ack_hold.min(delayed_ack),
            connect_timeout: self.connect_timeout.max(TICK),
            syn_acks: self.syn_acks.max(1),
            syn_ack_timeout: self.syn_ack_timeout.max(TICK),
            time_wait: self.time_wait.max(TICK),
            fin_wait_2: self.fin_wait_2.max(TICK),
            challenge_period: self.challenge_period.max(TICK),
            max_chunks: self.max_chunks.max(1),
            ..self
        };
        clamped.apply(tuning);
        clamped
    }

    /// The initial and the largest receive window, in bytes.
    pub(super) fn receive_windows(&self) -> (u32, u32) {
        let first = self.receive_window.min(MAX_WINDOW);
        (first, self.receive_window_max.clamp(first, MAX_WINDOW))
    }

    /// The settings that can be changed while the connection is open.
    pub fn tuning(&self) -> Tuning {
        let Self { user_timeout, keepalive, dscp, hop_limit, answer_delay, algorithm, .. } = *self;
        Tuning { user_timeout, keepalive, dscp, hop_limit, answer_delay, algorithm }
    }

    /// Replaces these settings.
    pub(super) fn apply(&mut self, tuning: Tuning) {
        let Tuning { user_timeout, keepalive, dscp, hop_limit, answer_delay, algorithm } = tuning;
        (self.user_timeout, self.keepalive) = (user_timeout, keepalive);
        (self.dscp, self.hop_limit) = (dscp, hop_limit);
        (self.answer_delay, self.algorithm) = (answer_delay, algorithm);
    }
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            receive_window: 1 << 20,
            receive_window_max: 8 << 20,
            algorithm: Algorithm::default(),
            initial_window: 10,
            window_scaling: true,
            timestamps: true,
            sack: true,
            ecn: true,
            rto_initial: Duration::from_secs(1),
            rto_min: Duration::from_millis(200),
            rto_max: Duration::from_mins(1),
            tlp_ack_delay: Duration::from_millis(2),
            delayed_ack: Duration::from_millis(1),
            answer_delay: None,
            ack_every: 16,
            ack_hold: Duration::from_micros(50),
            connect_timeout: Duration::from_secs(30),
            syn_acks: 4,
            syn_ack_timeout: Duration::from_secs(30),
            user_timeout: Duration::from_secs(30),
            keepalive: Some(Keepalive::default()),
            time_wait: Duration::from_secs(1),
            fin_wait_2: Duration::from_mins(1),
            path_mtu: PathMtuConfig::default(),
            dscp: 0,
            hop_limit: HOP_LIMIT,
            challenges: 10,
            challenge_period: Duration::from_secs(5),
            max_chunks: u32::MAX,
            reserve_chunks: 16,
        }
    }
}
