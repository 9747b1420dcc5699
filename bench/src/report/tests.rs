use clap::Parser as _;

use super::*;
use crate::{
    options::{Cli, Command},
    rnic::{Plan, Role, Verb},
};

fn bandwidth() -> Row {
    Row::Bandwidth(BandwidthRow {
        bytes: 65536,
        iterations: 1000,
        peak: Some(2.0 * 1_048_576.0),
        average: 1_048_576.0,
        cpu: Some(CpuUse::of(0.5, Some(0.25), f64::from(1 << 30), 1.0)),
    })
}

fn fields(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn a_bandwidth_row_has_perftests_columns() {
    let row = bandwidth();
    let unit = RateUnit::MebibytesPerSecond;
    assert_eq!(
        row.head(unit, false),
        " #bytes     #iterations    BW peak[MiB/sec]     BW average[MiB/sec]    MsgRate[Mpps]  "
    );
    assert_eq!(fields(&row.line(unit, false)), ["65536", "1000", "2.00", "1.00", "0.000016"]);
    assert_eq!(fields(&row.line(unit, true))[5..], ["50.00", "0.750"]);
    assert_eq!(fields(&row.line(RateUnit::GigabitsPerSecond, false))[3], "0.01");
}

#[test]
fn a_latency_row_has_perftests_columns() {
    let summary = Summary { min: 1.0, max: 9.0, typical: 2.0, average: 3.0, stdev: 0.5, p99: 8.0, p999: 8.5 };
    let row = Row::Latency(LatencyRow { bytes: 2, iterations: 1000, summary });
    let line = row.line(RateUnit::default(), false);
    assert_eq!(fields(&line), ["2", "1000", "1.00", "9.00", "2.00", "3.00", "0.50", "8.00", "8.50"]);
    assert_eq!(row.figure(Figure::Latency, RateUnit::default()).as_deref(), Some("3.00"));
    assert_eq!(row.figure(Figure::Bandwidth, RateUnit::default()), None);
}

fn report(rows: Vec<Row>, output: OutputArgs) -> Report {
    report_of(&plan("write_bw"), rows, output)
}

fn report_of(plan: &Plan, rows: Vec<Row>, output: OutputArgs) -> Report {
    let device = DeviceInfo { name: "xw0".into(), mtu: 1500, events: false, tos: 0 };
    let info = TestInfo::Rdma(Box::new(RdmaInfo::new(plan, Role::Client, device)));
    Report { output, info: Info::new(plan.title(), info), rows }
}

fn output() -> OutputArgs {
    OutputArgs {
        report_gbits: false,
        out_json: true,
        out_json_file: None,
        output: None,
        cpu_util: false,
        pin: None,
    }
}

fn plan(test: &str) -> Plan {
    let cli = Cli::try_parse_from(["xwarp-perf", test, "-n", "1000"]).unwrap();
    match cli.command {
        Command::WriteBw(args) => Plan::bandwidth(Verb::Write, &args).unwrap(),
        Command::WriteLat(args) => Plan::latency(Verb::Write, &args).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Type of each value by its path, as a program that reads the file sees it.
fn shape(value: &Value, path: &str, out: &mut Vec<(String, &'static str)>) {
    match value {
        Value::Object(object) => {
            object.iter().for_each(|(name, value)| shape(value, &format!("{path}/{name}"), out));
        }
        Value::Number(number) if number.is_f64() => out.push((path.into(), "fraction")),
        Value::Number(_) => out.push((path.into(), "integer")),
        Value::String(_) => out.push((path.into(), "string")),
        other => panic!("perftest writes no {other}"),
    }
}

fn shape_of(value: &Value) -> Vec<(String, &'static str)> {
    let mut out = Vec::new();
    shape(&value["test_info"], "", &mut out);
    shape(&value["results"], "", &mut out);
    out.sort();
    out
}

fn latency() -> LatencyRow {
    let summary =
        Summary { min: 1.0, max: 9.0, typical: 2.0, average: 3.004, stdev: 0.5, p99: 8.0, p999: 8.5 };
    LatencyRow { bytes: 2, iterations: 1000, summary }
}

/// The files were made by hand from the format strings of perftest 26.04.17 (`write_test_info_to_file`,
/// `write_bw_report_to_file`, `write_report_lat_to_file` and `write_report_lat_duration_to_file` in `perftest_parameters.c`), for
/// the client of an iWARP device without inline data; `GID_index` is in the file that perftest 4.5 writes over siw
/// (`siw_perftest_writes_the_json_that_we_write`).
#[test]
fn json_has_perftests_keys_nesting_and_types() {
    let duration = Row::Duration(DurationRow { latency: latency(), transactions: 1e5 });
    for (test, row, cpu_util, theirs) in [
        ("write_bw", bandwidth(), true, include_str!("tests/perftest_bw.json")),
        ("write_lat", Row::Latency(latency()), false, include_str!("tests/perftest_lat.json")),
        ("write_lat", duration, false, include_str!("tests/perftest_duration.json")),
    ] {
        let report = report_of(&plan(test), vec![row], OutputArgs { cpu_util, ..output() });
        let ours = serde_json::to_value(report.document(Map::new())).unwrap();
        let theirs: Value = serde_json::from_str(theirs).unwrap();
        assert_eq!(ours["test_info"]["test"], theirs["test_info"]["test"]);
        assert_eq!(shape_of(&ours), shape_of(&theirs));
    }
}

#[test]
fn json_has_the_last_row_where_perftest_has_it_and_all_rows_beside() {
    let Row::Bandwidth(first) = bandwidth() else { panic!("no bandwidth") };
    let rows = vec![Row::Bandwidth(BandwidthRow { bytes: 2, ..first }), bandwidth()];
    let mut other = Map::new();
    other.insert("counters".into(), serde_json::json!({"drops": 0}));
    let value = serde_json::to_value(report(rows, output()).document(other)).unwrap();
    assert_eq!(value["results"]["MsgSize"], 65536);
    assert_eq!(value["results"]["BW_average"], 1.0);
    assert_eq!(value["xwarp"]["rows"][0]["bytes"], 2);
    assert_eq!(value["xwarp"]["rows"].as_array().map(Vec::len), Some(2));
    assert_eq!(value["xwarp"]["counters"]["drops"], 0);
}

#[test]
fn json_has_only_the_requested_figure() {
    let output = OutputArgs { output: Some(Figure::MessageRate), ..output() };
    let value = serde_json::to_value(report(vec![bandwidth()], output).document(Map::new())).unwrap();
    assert_eq!(value["results"], serde_json::json!({"msgRate_avg": 0.000_016}));
}

#[test]
fn a_timed_latency_has_perftests_columns_first_and_then_percentiles() {
    let row = Row::Duration(DurationRow { latency: latency(), transactions: 1e5 });
    let line = row.line(RateUnit::default(), false);
    assert_eq!(fields(&line)[..4], ["2", "1000", "3.00", "100000.00"]);
    assert_eq!(fields(&line)[4..], ["1.00", "9.00", "2.00", "8.00", "8.50"]);
    assert!(row.head(RateUnit::default(), false).ends_with("99% percentile[usec]   99.9% percentile[usec]"));
}

#[test]
fn the_block_has_two_labels_a_line() {
    let text = block(
        &report(Vec::new(), output()).info.line("Device", "xw0").line("Number of qps", 4).line("Mtu", 1500),
    );
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[1].trim(), "RDMA_Write BW Test");
    assert_eq!(lines[2], " Device          : xw0             Number of qps   : 4");
    assert_eq!(lines[3], " Mtu             : 1500");
}
