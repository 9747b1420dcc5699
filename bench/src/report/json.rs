//! The JSON file of `--out_json`, with the keys, nesting and number types of perftest (version 24.01 or
//! later, the first whose file is valid JSON). perftest writes only the last row; all rows and xwarp's other
//! data are in a separate object, `xwarp`.

use serde::Serialize;
use serde_json::{Map, Value};

use super::{BandwidthRow, LatencyRow, Row};
use crate::{
    options::Figure,
    rnic::{Kind, Plan, Role},
    units::RateUnit,
};

/// The whole file.
#[derive(Debug, Serialize)]
pub(super) struct Document<'a> {
    pub test_info: &'a TestInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub results: Option<Results>,
    pub xwarp: Extra,
}

/// The description of the test.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum TestInfo {
    /// A test of the RNIC.
    Rdma(Box<RdmaInfo>),
    /// A baseline, which perftest does not have.
    Baseline {
        /// Its title.
        test: String,
        /// The protocol under test.
        #[serde(rename = "Transport_type")]
        transport: &'static str,
    },
}

/// The `test_info` of perftest.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct RdmaInfo {
    #[serde(rename = "test")]
    test: String,
    #[serde(rename = "Test with events", skip_serializing_if = "Option::is_none")]
    events: Option<String>,
    #[serde(rename = "Dual_port")]
    dual_port: &'static str,
    device: String,
    #[serde(rename = "Number_of_qps")]
    queue_pairs: u32,
    #[serde(rename = "Transport_type")]
    transport: &'static str,
    #[serde(rename = "Connection_type")]
    connection: &'static str,
    #[serde(rename = "Using_SRQ")]
    shared_receive_queue: &'static str,
    #[serde(rename = "PCIe_relax_order")]
    relaxed_order: &'static str,
    #[serde(rename = "ibv_wr_API")]
    wr_api: &'static str,
    #[serde(rename = "TX_depth", skip_serializing_if = "Option::is_none")]
    tx_depth: Option<u32>,
    #[serde(rename = "Post_List", skip_serializing_if = "Option::is_none")]
    post_list: Option<u32>,
    #[serde(rename = "Recv_Post_List", skip_serializing_if = "Option::is_none")]
    recv_post_list: Option<u32>,
    #[serde(rename = "RX_depth", skip_serializing_if = "Option::is_none")]
    rx_depth: Option<u32>,
    #[serde(rename = "CQ_Moderation", skip_serializing_if = "Option::is_none")]
    cq_moderation: Option<u32>,
    mtu: u32,
    #[serde(rename = "Link_type")]
    link: &'static str,
    /// perftest writes 0 for each Ethernet device, also of iWARP.
    #[serde(rename = "GID_index")]
    gid_index: u32,
    #[serde(rename = "Max_inline_data", skip_serializing_if = "Option::is_none")]
    inline: Option<u32>,
    #[serde(rename = "Outstand_reads", skip_serializing_if = "Option::is_none")]
    reads: Option<u16>,
    #[serde(rename = "rdma_cm_QPs")]
    rdma_cm: &'static str,
    #[serde(rename = "Use_ROCm_memory")]
    rocm: &'static str,
    #[serde(rename = "Data_ex_method")]
    exchange: &'static str,
    #[serde(rename = "TOS", skip_serializing_if = "Option::is_none")]
    tos: Option<u8>,
}

/// The device's part of `test_info`.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Name of the interface.
    pub name: String,
    /// MTU of the interface, in bytes.
    pub mtu: u32,
    /// Whether the test sleeps until completions arrive.
    pub events: bool,
    /// Type-of-service byte; 0 is the default.
    pub tos: u8,
}

impl RdmaInfo {
    /// Creates the description of `plan` at the end `role`.
    pub fn new(plan: &Plan, role: Role, device: DeviceInfo) -> Self {
        let (verb, bandwidth) = (plan.test.verb, plan.test.kind == Kind::Bandwidth);
        let both = plan.bidirectional;
        let over_one = |count: u32| (count > 1).then_some(count);
        Self {
            test: plan.title().replace(' ', "_"),
            events: device.events.then(|| format!("Using_{}_comp0", device.name)),
            dual_port: "OFF",
            device: device.name,
            queue_pairs: plan.queue_pairs,
            transport: "IW",
            connection: "RC",
            shared_receive_queue: if plan.shared_receive_queue { "ON" } else { "OFF" },
            relaxed_order: "Unsupported",
            wr_api: "OFF",
            tx_depth: (role == Role::Client || both).then_some(plan.tx_depth),
            post_list: over_one(plan.post_list),
            recv_post_list: over_one(plan.recv_post_list),
            rx_depth: (verb.takes_receives() && (role == Role::Server || both)).then_some(plan.rx_depth),
            cq_moderation: bandwidth.then_some(plan.cq_mod),
            mtu: device.mtu,
            link: "Ethernet",
            gid_index: 0,
            inline: (!verb.fetches()).then_some(plan.inline),
            reads: verb.fetches().then_some(plan.reads),
            rdma_cm: "ON",
            rocm: "OFF",
            exchange: "rdma_cm",
            tos: (device.tos != 0).then_some(device.tos),
        }
    }
}

/// The `results` of perftest, for one row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Results {
    Bandwidth {
        #[serde(rename = "MsgSize")]
        bytes: u64,
        #[serde(rename = "n_iterations")]
        iterations: u64,
        #[serde(rename = "BW_peak")]
        peak: f64,
        #[serde(rename = "BW_average")]
        average: f64,
        #[serde(rename = "MsgRate")]
        rate: f64,
        #[serde(rename = "CPU_util", skip_serializing_if = "Option::is_none")]
        cpu: Option<f64>,
    },
    Latency {
        #[serde(rename = "MsgSize")]
        bytes: u64,
        #[serde(rename = "n_iterations")]
        iterations: u64,
        t_min: f64,
        t_max: f64,
        t_typical: f64,
        t_avg: f64,
        t_stdev: f64,
        percentile_99: f64,
        #[serde(rename = "percentile_99.9")]
        percentile_99_9: f64,
    },
    Duration {
        #[serde(rename = "MsgSize")]
        bytes: u64,
        #[serde(rename = "n_iterations")]
        iterations: u64,
        t_avg: f64,
        tps_average: f64,
    },
    AverageBandwidth {
        bw_avg: f64,
    },
    AverageRate {
        #[serde(rename = "msgRate_avg")]
        rate: f64,
    },
    AverageLatency {
        avg_lat: f64,
    },
    AverageDuration {
        t_avg: f64,
    },
}

/// Data for which perftest's JSON has no key.
#[derive(Debug, Serialize)]
pub(super) struct Extra {
    /// Unit of the bandwidths.
    pub bw_unit: &'static str,
    /// Every row, with full precision.
    pub rows: Vec<ExtraRow>,
    /// Counters of the RNIC and other data.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// One row with full precision; times are in microseconds.
#[derive(Debug, Serialize)]
pub(super) struct ExtraRow {
    bytes: u64,
    iterations: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bw_peak: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bw_average: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    msg_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_sec_per_gib_local: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_sec_per_gib_remote: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency: Option<crate::stats::Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tps: Option<f64>,
}

/// Rounds `value` like printf's `%.<digits>f`.
fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

impl Results {
    /// Converts a row, or with `--output` only one figure of it.
    pub fn of(row: &Row, unit: RateUnit, cpu_util: bool, figure: Option<Figure>) -> Self {
        match (row, figure) {
            (Row::Bandwidth(row), Some(Figure::Bandwidth)) => {
                Self::AverageBandwidth { bw_avg: unit.convert(row.average) }
            }
            (Row::Bandwidth(row), Some(Figure::MessageRate)) => {
                Self::AverageRate { rate: row.message_rate() }
            }
            (Row::Latency(row), Some(Figure::Latency)) => {
                Self::AverageLatency { avg_lat: row.summary.average }
            }
            (Row::Duration(row), Some(Figure::Latency)) => {
                Self::AverageDuration { t_avg: row.latency.summary.average }
            }
            (Row::Bandwidth(row), _) => Self::bandwidth(row, unit, cpu_util),
            (Row::Latency(LatencyRow { bytes, iterations, summary: s }), _) => Self::Latency {
                bytes: *bytes,
                iterations: *iterations,
                t_min: round(s.min, 2),
                t_max: round(s.max, 2),
                t_typical: round(s.typical, 2),
                t_avg: round(s.average, 2),
                t_stdev: round(s.stdev, 2),
                percentile_99: round(s.p99, 2),
                percentile_99_9: round(s.p999, 2),
            },
            (Row::Duration(row), _) => Self::Duration {
                bytes: row.latency.bytes,
                iterations: row.latency.iterations,
                t_avg: round(row.latency.summary.average, 2),
                tps_average: round(row.transactions, 2),
            },
        }
    }

    fn bandwidth(row: &BandwidthRow, unit: RateUnit, cpu_util: bool) -> Self {
        // perftest prints small figures in Gb/sec with six digits.
        let average = unit.convert(row.average);
        let digits = if unit == RateUnit::GigabitsPerSecond && average < 0.1 { 6 } else { 2 };
        Self::Bandwidth {
            bytes: row.bytes,
            iterations: row.iterations,
            peak: round(row.peak.map_or(0.0, |peak| unit.convert(peak)), digits),
            average: round(average, digits),
            rate: round(row.message_rate(), 6),
            cpu: row.cpu.filter(|_| cpu_util).map(|cpu| round(cpu.utilisation, 2)),
        }
    }
}

impl ExtraRow {
    /// Converts a row with all known figures.
    pub fn of(row: &Row, unit: RateUnit) -> Self {
        let (bytes, iterations) = row.extent();
        let bandwidth = if let Row::Bandwidth(row) = row { Some(row) } else { None };
        let cpu = bandwidth.and_then(|row| row.cpu);
        Self {
            bytes,
            iterations,
            bw_peak: bandwidth.and_then(|row| row.peak).map(|peak| unit.convert(peak)),
            bw_average: bandwidth.map(|row| unit.convert(row.average)),
            msg_rate: bandwidth.map(BandwidthRow::message_rate),
            cpu_sec_per_gib_local: cpu.map(|cpu| cpu.local_seconds_per_gib),
            cpu_sec_per_gib_remote: cpu.and_then(|cpu| cpu.remote_seconds_per_gib),
            latency: match row {
                Row::Bandwidth(_) => None,
                Row::Latency(row) => Some(row.summary),
                Row::Duration(row) => Some(row.latency.summary),
            },
            tps: if let Row::Duration(row) = row { Some(row.transactions) } else { None },
        }
    }
}
