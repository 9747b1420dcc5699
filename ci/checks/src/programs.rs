//! The programs of a distribution over the drop-in libraries, as the rows of the table in `docs/compat.md`: what is run for each row,
//! and what must come of it.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;

use crate::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    unmodified::{LIMIT, await_listener, connect, connect_by, pair, run, start, xwarp},
};

/// Port of `ucmatose` and `cmtime`.
const CM_PORT: u16 = 7471;
/// Port of `iperf3`.
const IPERF_PORT: u16 = 5201;

/// One row: its programs as the table writes them, and their runs.
struct Row {
    programs: &'static str,
    runs: fn(&Lab) -> Result<()>,
}

const ROWS: [Row; 14] = [
    Row { programs: "`ibv_devices`, `ibv_devinfo -v`, `ibv_asyncwatch`", runs: devices },
    Row { programs: "`rping`", runs: rping },
    Row { programs: "`ucmatose`", runs: ucmatose },
    Row { programs: "`cmtime`", runs: cmtime },
    Row {
        programs: "`rdma_client`, `rdma_server`, `rdma_xclient`, `rdma_xserver`",
        runs: librdmacm_examples,
    },
    Row { programs: "`ibv_rc_pingpong`, `ibv_srq_pingpong`", runs: pingpong },
    Row { programs: "`rstream`, `riostream`, `rcopy`", runs: rsockets },
    Row {
        programs: "`ib_send_*`, `ib_write_*`, `ib_read_*`, `ib_atomic_*` with `-R`",
        runs: perftest_by_manager,
    },
    Row { programs: "the same without `-R`, with `-x 0`", runs: perftest_by_number },
    Row { programs: "`qperf`", runs: qperf },
    Row { programs: "`fi_info -p verbs`", runs: fi_info },
    Row { programs: "`fi_pingpong -p verbs -e msg`", runs: |lab| fi_pingpong(lab, "-p verbs -e msg") },
    Row {
        programs: "`fi_pingpong -p verbs;ofi_rxm -e rdm`",
        runs: |lab| fi_pingpong(lab, "-p verbs;ofi_rxm -e rdm"),
    },
    Row { programs: "`iperf3` over `xwarp sdp`", runs: iperf3_over_sdp },
];

/// The programs of a row, and what failed.
#[derive(Debug)]
pub struct Outcome {
    /// The first column of the table.
    pub programs: &'static str,
    /// Which of the runs failed first, and why.
    pub result: Result<()>,
}

/// Runs the programs of all rows in the root of a distribution. Each row has a lab of its own, so that what a failed program leaves
/// does not reach the next.
pub fn run_all(suite: &'static str) -> Vec<Outcome> {
    ROWS.iter()
        .map(|row| {
            let lab = Lab::up(LabOptions { distribution: Some(suite), ..LabOptions::default() });
            Outcome { programs: row.programs, result: lab.and_then(|lab| (row.runs)(&lab)) }
        })
        .collect()
}

fn address(lab: &Lab, family: Family) -> String {
    lab.address(Side::B, family).to_string()
}

/// Runs a server and a client that both end by themselves; the client must print `expected`.
fn expect(lab: &Lab, server: &str, client: &str, expected: &str) -> Result<()> {
    let [_, said] = pair(lab, server, client).with_context(|| client.to_owned())?;
    ensure!(said.contains(expected), "{client}: no {expected:?} in\n{said}");
    Ok(())
}

fn devices(lab: &Lab) -> Result<()> {
    let said = run(lab, Side::A, "ibv_devices")?;
    ensure!(said.lines().any(|line| line.split_whitespace().next() == Some(INTERFACE)), "{said}");
    let said = run(lab, Side::A, "ibv_devinfo -v")?;
    for row in ["iWARP (1)", "PORT_ACTIVE (4)", "link_layer:\t\tEthernet"] {
        ensure!(said.contains(row), "no {row:?} in\n{said}");
    }
    let mut watch = start(lab, Side::A, "stdbuf -oL ibv_asyncwatch")?;
    watch.wait_for("async event FD", LIMIT)?;
    for (state, event) in [("down", "IBV_EVENT_PORT_ERR"), ("up", "IBV_EVENT_PORT_ACTIVE")] {
        lab.run(Side::B, "ip", &["link", "set", INTERFACE, state])?;
        watch.wait_for(event, LIMIT)?;
    }
    Ok(())
}

fn rping(lab: &Lab) -> Result<()> {
    for (family, options) in [
        (Family::V4, "-C 20 -S 64 -V -v"),
        (Family::V6, "-C 10 -S 4001 -V"),
        (Family::V4, "-C 5 -S 65535 -V -p 7200"),
        (Family::V4, "-C 10 -V -q"),
    ] {
        let to = address(lab, family);
        let client = format!("rping -c -a {to} {options}");
        pair(lab, &format!("rping -s -a {to} {options}"), &client).with_context(|| client.clone())?;
    }
    // This server serves one client after another, until it is stopped.
    let to = address(lab, Family::V4);
    let server = start(lab, Side::B, &format!("rping -s -P -a {to}"))?;
    served(lab, server, &[&format!("rping -c -a {to} -C 10 -V"), &format!("rping -c -a {to} -C 5 -S 100 -V")])
}

/// Runs clients of a server that must be stopped.
fn served(lab: &Lab, mut server: Running, clients: &[&str]) -> Result<()> {
    for client in clients {
        connect(lab, &mut server, client).with_context(|| (*client).to_owned())?;
    }
    server.signal(Signal::KILL)
}

fn ucmatose(lab: &Lab) -> Result<()> {
    let to = lab.address(Side::B, Family::V4);
    for options in ["", "-c 4 -C 50 -S 4096"] {
        let mut server = start(lab, Side::B, &format!("ucmatose -b {to} {options}"))?;
        await_listener(lab, (to, CM_PORT).into())?;
        connect(lab, &mut server, &format!("ucmatose -s {to} {options}"))?;
        server.finish(LIMIT)?;
    }
    Ok(())
}

fn cmtime(lab: &Lab) -> Result<()> {
    let to = lab.address(Side::B, Family::V4);
    let server = start(lab, Side::B, &format!("cmtime -b {to} -c 20"))?;
    await_listener(lab, (to, CM_PORT).into())?;
    served(lab, server, &[&format!("cmtime -s {to} -c 20")])
}

fn librdmacm_examples(lab: &Lab) -> Result<()> {
    let to = address(lab, Family::V4);
    expect(lab, "rdma_server", &format!("rdma_client -s {to}"), "rdma_client: end 0")?;
    pair(lab, "rdma_xserver", &format!("rdma_xclient -s {to}")).context("rdma_xclient").map(drop)
}

fn pingpong(lab: &Lab) -> Result<()> {
    let to = address(lab, Family::V4);
    for line in [
        "ibv_rc_pingpong -g 0 -n 200 -c",
        "ibv_rc_pingpong -g 0 -n 200 -e",
        "ibv_rc_pingpong -g 0 -n 200 -t",
        "ibv_rc_pingpong -g 0 -n 200 -N",
        "ibv_srq_pingpong -g 0 -n 200 -q 1",
    ] {
        expect(lab, line, &format!("{line} {to}"), "200 iters")?;
    }
    Ok(())
}

fn rsockets(lab: &Lab) -> Result<()> {
    for (line, family) in [
        ("rstream -S 4096 -C 100 -T v", Family::V4),
        ("rstream -S 65536 -C 20 -T b -T v", Family::V4),
        ("rstream -S 4096 -C 100 -T n -T v", Family::V6),
        ("riostream -S 4096 -C 100 -T v", Family::V4),
    ] {
        let to = address(lab, family);
        expect(lab, &format!("{line} -b {to}"), &format!("{line} -s {to}"), "custom ")?;
    }
    let (from, to) = (lab.file("from"), lab.file("to"));
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| (number * 7 / 5) as u8).collect();
    fs::write(&from, &bytes)?;
    let server = start(lab, Side::B, "rcopy")?;
    let client = format!("rcopy {} {}:{}", from.display(), address(lab, Family::V4), to.display());
    served(lab, server, &[&client])?;
    ensure!(fs::read(&to)? == bytes, "the copy differs");
    Ok(())
}

/// Number of rows in perftest's table: lines of numbers.
fn measured(text: &str) -> usize {
    let numeric = |line: &&str| {
        line.split_whitespace().count() > 3 && line.split_whitespace().all(|word| word.parse::<f64>().is_ok())
    };
    text.lines().filter(numeric).count()
}

/// Runs perftest's programs, each with its options.
fn perftest(lab: &Lab, lines: &[&str]) -> Result<()> {
    let to = address(lab, Family::V4);
    for line in lines {
        let [_, said] = pair(lab, line, &format!("{line} {to}")).with_context(|| (*line).to_owned())?;
        ensure!(measured(&said) > 0, "{line}: no row of results in\n{said}");
    }
    Ok(())
}

fn perftest_by_manager(lab: &Lab) -> Result<()> {
    let lines = [
        "ib_send_bw -F -R -n 200 -s 4096",
        "ib_send_lat -F -R -n 200 -s 64 -e",
        "ib_send_bw -F -R -n 200 -s 64 --use_old_post_send",
        "ib_send_bw -F -R -n 200 -s 4096 -b -q 4",
        "ib_send_bw -F -R -n 200 -s 4096 --use-srq",
        "ib_write_bw -F -R -n 5 -a",
        "ib_write_lat -F -R -n 200 -s 64 -I 64",
        "ib_write_bw -F -R -n 200 -s 4096 -t 8",
        "ib_write_bw -F -R -D 1 -s 4096",
        "ib_read_bw -F -R -n 200 -s 4096 -o 4",
        "ib_read_lat -F -R -n 200 -s 64",
        "ib_atomic_bw -F -R -n 200",
        "ib_atomic_lat -F -R -n 200 -A CMP_AND_SWAP",
    ];
    perftest(lab, &lines)
}

fn perftest_by_number(lab: &Lab) -> Result<()> {
    // Not ib_send_bw, which leaves a region registered and fails at its end (docs/compat.md).
    let lines = ["ib_send_lat", "ib_write_lat", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"];
    let lines = lines.map(|program| format!("{program} -F -n 200 -x 0"));
    perftest(lab, &lines.each_ref().map(String::as_str))
}

fn qperf(lab: &Lab) -> Result<()> {
    let to = address(lab, Family::V4);
    let server = start(lab, Side::B, "qperf")?;
    for test in
        ["rc_bw", "rc_lat", "rc_rdma_write_bw", "rc_rdma_write_lat", "rc_rdma_read_bw", "rc_rdma_read_lat"]
    {
        let said = run(lab, Side::A, &format!("qperf -t 1 -cm 1 --wait_server 10 {to} {test}"))?;
        ensure!(said.contains(" = "), "{test}: {said}");
    }
    server.signal(Signal::KILL)
}

fn fi_info(lab: &Lab) -> Result<()> {
    let said = run(lab, Side::A, "fi_info -p verbs")?;
    ensure!(said.contains("FI_PROTO_IWARP"), "{said}");
    Ok(())
}

fn fi_pingpong(lab: &Lab, options: &str) -> Result<()> {
    let line = format!("fi_pingpong {options} -I 50 -c");
    let [_, said] = pair(lab, &line, &format!("{line} {}", address(lab, Family::V4)))?;
    ensure!(said.lines().any(|line| line.starts_with("1m ")), "{line}: {said}");
    Ok(())
}

fn iperf3_over_sdp(lab: &Lab) -> Result<()> {
    let to = lab.address(Side::B, Family::V4);
    let start = |side, arguments: &[&str]| {
        let mut command = lab.program(side, xwarp()?);
        command.args(["sdp", "--device", INTERFACE, "--only", "--", "iperf3"]).args(arguments);
        Running::start(command)
    };
    let mut server = start(Side::B, &["-s", "-1", "--forceflush"])?;
    server.wait_for("Server listening", LIMIT)?;
    let (port, to) = (IPERF_PORT.to_string(), to.to_string());
    let client = ["-c", to.as_str(), "-p", &port, "-n", "50M"];
    connect_by(&mut server, "iperf3", || start(Side::A, &client))?;
    server.finish(LIMIT).map(drop)
}

/// The cells of one column of the table in `docs/compat.md`, by the programs of their rows.
pub fn documented(column: &str) -> Result<Vec<(String, String)>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/compat.md");
    let page = fs::read_to_string(page)?;
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let mut lines = page.lines();
    let Some((names, index)) = lines.by_ref().find_map(|line| {
        let names = cells(line);
        let index = names.iter().position(|name| name == column)?;
        Some((names, index))
    }) else {
        bail!("docs/compat.md has no table with a column {column}")
    };
    let rows = lines.skip(1).take_while(|line| line.starts_with('|')).map(cells);
    rows.map(|row| {
        ensure!(row.len() == names.len(), "a row of {} cells: {row:?}", row.len());
        Ok((row.first().cloned().unwrap_or_default(), row.get(index).cloned().unwrap_or_default()))
    })
    .collect()
}
