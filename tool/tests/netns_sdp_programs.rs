//! Unmodified programs over SDP between two namespaces, started by `xwarp sdp`. What was sent is compared with what arrived.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    env, fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    recorded::Recorded,
    shared::SharedInterface,
    tshark,
    vm::built,
};
use xwarp_sdp::mapper::{Asked, Question};

const XWARP: &str = env!("CARGO_BIN_EXE_xwarp");
const LIMIT: Duration = Duration::from_secs(60);
const PORT: u16 = 7000;

/// How a program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// Over SDP where the peer wants.
    Sdp,
    /// Over the kernel's TCP.
    Tcp,
}

fn lab() -> Recorded {
    Recorded::up(LabOptions { mtu: 9000, ..LabOptions::default() }).unwrap()
}

/// The library, which cargo has built as a dependency of this test.
fn library() -> PathBuf {
    let path = env::current_exe().unwrap().with_file_name("libxwarp_sdp_preload.so");
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// Starts a shell command of a side, over SDP or not.
fn shell(lab: &Recorded, side: Side, by: By, script: &str) -> Running {
    Running::start(command(lab, side, by, script)).unwrap()
}

fn command(lab: &Recorded, side: Side, by: By, script: &str) -> Command {
    let mut command = match by {
        By::Tcp => lab.command(side, "sh"),
        By::Sdp => {
            let mut command: Command = lab.command(side, XWARP);
            command.arg("sdp").arg("--statistics").arg("--library").arg(library());
            command.arg("--capture").arg(lab.captures());
            command.args(["--", "sh"]);
            command
        }
    };
    command.args(["-c", script]);
    command
}

fn address(lab: &Lab) -> SocketAddr {
    SocketAddr::new(lab.address(Side::B, Family::V4), PORT)
}

/// Waits until somebody listens at B, over SDP or the kernel's TCP.
fn wait_for_listener(lab: &Lab, by: By, server: &mut Running) {
    let end = Instant::now() + LIMIT;
    let listens = || match by {
        By::Tcp => {
            let filter = format!("sport = :{PORT}");
            !lab.run(Side::B, "ss", &["-Hltn", &filter]).unwrap().trim().is_empty()
        }
        By::Sdp => {
            let from = SocketAddr::new(lab.address(Side::A, Family::V4), 1);
            let asked = lab.within(Side::A, || Question::new(from, address(lab)).ask(1)).unwrap();
            matches!(asked, Ok(Asked::Accepted(..)))
        }
    };
    while !listens() {
        let ended = server.wait(Duration::from_millis(20));
        assert!(ended.is_err() && Instant::now() < end, "nobody listens: {ended:?}\n{}", server.output());
    }
}

/// Bytes that the program `name` says it has sent and received over SDP, added over its processes.
fn carried(output: &str, name: &str) -> (u64, u64) {
    let lines = output.lines().filter(|line| line.starts_with(&format!("xwarp-sdp: {name}[")));
    let number = |line: &str, before: &str| -> u64 {
        let rest = line.split(before).nth(1).unwrap();
        rest.split_ascii_whitespace().next().unwrap().parse().unwrap()
    };
    lines.fold((0, 0), |(sent, received), line| {
        (sent + number(line, " sent "), received + number(line, " received "))
    })
}

fn random_file(lab: &Lab, name: &str, bytes: usize) -> PathBuf {
    let path = lab.file(name);
    let (mut state, mut content) = (0x9e37_79b9_7f4a_7c15_u64 ^ bytes as u64, Vec::with_capacity(bytes));
    while content.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        content.extend(state.to_le_bytes());
    }
    content.truncate(bytes);
    fs::write(&path, content).unwrap();
    path
}

fn assert_same(a: &Path, b: &Path) {
    let (a_bytes, b_bytes) = (fs::read(a).unwrap(), fs::read(b).unwrap());
    assert_eq!(a_bytes.len(), b_bytes.len(), "{} and {}", a.display(), b.display());
    assert!(a_bytes == b_bytes, "{} and {} differ", a.display(), b.display());
}

/// The ways in which two programs may be started: both over SDP, and one of them.
const WAYS: [(By, By); 3] = [(By::Sdp, By::Sdp), (By::Sdp, By::Tcp), (By::Tcp, By::Sdp)];

fn both(server: By, client: By) -> bool {
    (server, client) == (By::Sdp, By::Sdp)
}

/// Checks the statistics of the client `name`: SDP has carried its bytes if both ends were started over SDP, and kernel TCP
/// otherwise.
fn assert_way(output: &str, name: &str, (server, client): (By, By)) {
    let counts = output.contains(&format!("xwarp-sdp: {name}["));
    assert_eq!(counts, client == By::Sdp, "statistics of {name}: {output}");
    let (sent, received) = carried(output, name);
    assert_eq!(sent > 0 && received > 0, both(server, client), "{server:?}, {client:?}: {output}");
    assert!(both(server, client) || (sent, received) == (0, 0), "{server:?}, {client:?}: {output}");
}

#[test]
fn netns_sdp_nc_carries_both_directions_and_half_closes() {
    for (server_by, client_by) in WAYS {
        let lab = lab();
        let [up, down] = [("up", 3_000_001), ("down", 2_000_003)].map(|(name, n)| random_file(&lab, name, n));
        let [got_up, got_down] = ["got-up", "got-down"].map(|name| lab.file(name));
        let address = address(&lab);
        let script =
            format!("exec nc -N -l {} {PORT} < {} > {}", address.ip(), down.display(), got_up.display());
        let mut server = shell(&lab, Side::B, server_by, &script);
        wait_for_listener(&lab, server_by, &mut server);
        let script =
            format!("exec nc -N {} {PORT} < {} > {}", address.ip(), up.display(), got_down.display());
        let output = shell(&lab, Side::A, client_by, &script).finish(LIMIT).unwrap();
        let served = server.finish(LIMIT).unwrap();
        assert_same(&up, &got_up);
        assert_same(&down, &got_down);
        assert_eq!(
            lab.messages().unwrap().values().sum::<usize>() > 100,
            both(server_by, client_by),
            "messages in the captures"
        );
        let expected = if both(server_by, client_by) { (3_000_001, 2_000_003) } else { (0, 0) };
        assert_eq!(carried(&output, "nc"), expected, "{output}");
        assert_eq!(carried(&served, "nc"), (expected.1, expected.0), "{served}");
    }
}

#[test]
fn netns_sdp_nc_reaches_a_listener_of_both_families() {
    let lab = lab();
    let server = format!("exec socat TCP6-LISTEN:{PORT},reuseaddr,fork,ipv6only=0 EXEC:cat");
    let [four, six] = [Family::V4, Family::V6].map(|family| lab.address(Side::B, family));
    let client = format!(
        "set -e; test $(echo four | nc -N {four} {PORT}) = four; \
         test $(echo sixth | nc -N {six} {PORT}) = sixth"
    );
    let (_server, output) = over_sdp(&lab, &server, &client);
    assert_eq!(carried(&output, "nc"), (11, 11), "{output}");
}

#[test]
fn netns_sdp_curl_fetches_files_from_python() {
    for (server_by, client_by) in WAYS {
        let lab = lab();
        let file = random_file(&lab, "file", 5_000_000);
        let directory = file.parent().unwrap();
        let script =
            format!("exec /usr/bin/python3 -m http.server {PORT} --directory {}", directory.display());
        let mut server = shell(&lab, Side::B, server_by, &script);
        wait_for_listener(&lab, server_by, &mut server);
        let url = format!("http://{}/file", address(&lab));
        let fetched = lab.file("fetched");
        // The log is written to the end of the program.
        let script = format!("exec env XWARP_SDP_LOG=xwarp=debug curl -sS -o {} {url}", fetched.display());
        let output = shell(&lab, Side::A, client_by, &script).finish(LIMIT).unwrap();
        assert_eq!(output.contains("the program ends"), client_by == By::Sdp, "{output}");
        assert_same(&file, &fetched);
        assert_eq!(carried(&output, "curl").1 >= 5_000_000, both(server_by, client_by), "{output}");
    }
}

/// Starts a server, waits for it, runs a client, and returns the client's output.
fn run(lab: &Recorded, (server_by, client_by): (By, By), server: &str, client: &str) -> (Running, String) {
    let mut server = shell(lab, Side::B, server_by, server);
    wait_for_listener(lab, server_by, &mut server);
    match shell(lab, Side::A, client_by, client).finish(LIMIT) {
        Ok(output) => (server, output),
        Err(error) => {
            let _ = server.wait(Duration::from_millis(100));
            panic!("{error:#}\nserver:\n{}", server.output());
        }
    }
}

/// Does the same with both over SDP.
fn over_sdp(lab: &Recorded, server: &str, client: &str) -> (Running, String) {
    run(lab, (By::Sdp, By::Sdp), server, client)
}

/// Runs the Python program `script` as server and as client, which both find that all is well. Returns the client's output.
fn serve_and_call(lab: &Recorded, script: &str) -> String {
    let program = lab.file("program.py");
    fs::write(&program, script).unwrap();
    let run = format!("exec /usr/bin/python3 {}", program.display());
    let peer = lab.address(Side::B, Family::V4);
    let (server, output) =
        over_sdp(lab, &format!("{run} serve {peer} {PORT}"), &format!("{run} call {peer} {PORT}"));
    let served = server.finish(LIMIT).unwrap();
    assert!(output.contains("all is well"), "{output}\n{served}");
    assert!(served.contains("all is well"), "{served}\n{output}");
    output
}

#[test]
fn netns_sdp_a_child_of_socat_writes_to_an_inherited_connection() {
    let lab = lab();
    let file = random_file(&lab, "file", 1_000_000);
    let fetched = lab.file("fetched");
    let server = format!(
        "exec /usr/bin/socat TCP-LISTEN:{PORT},reuseaddr,fork SYSTEM:'tail -c +500001 {}'",
        file.display()
    );
    let client = format!("exec nc {} {PORT} > {}", address(&lab).ip(), fetched.display());
    // A forked child of the server, which runs other programs, writes to the accepted connection.
    let (_server, output) = over_sdp(&lab, &server, &client);
    let expected = lab.file("expected");
    fs::write(&expected, &fs::read(&file).unwrap()[500_000..]).unwrap();
    assert_same(&expected, &fetched);
    assert_eq!(carried(&output, "nc"), (0, 500_000), "{output}");
}

#[test]
fn netns_sdp_iperf3_in_all_directions() {
    for options in ["-t 1", "-t 1 -R", "-t 1 --bidir", "-t 1 -P 8", "-n 16M --bidir -P 2"] {
        let lab = lab();
        let host = address(&lab).ip();
        // The captures end after 16 or 32 MiB, by the unit of the shell.
        let bounded = "ulimit -f 32768; trap '' XFSZ; exec iperf3";
        let server = format!("{bounded} -s -1 -p {PORT}");
        let client = format!("{bounded} -c {host} -p {PORT} {options}");
        let (server, output) = over_sdp(&lab, &server, &client);
        assert!(output.contains("iperf Done"), "{output}");
        let (sent, received) = carried(&output, "iperf3");
        assert!(sent.max(received) > 100_000, "{options}: {output}");
        server.finish(LIMIT).unwrap();
    }
}

#[test]
fn netns_sdp_redis_serves_its_benchmark_while_it_saves() {
    let lab = lab();
    let directory = lab.file("dump").parent().unwrap().display().to_string();
    let server = format!(
        "exec redis-server --port {PORT} --bind 0.0.0.0 --protected-mode no --save '' --dir {directory}"
    );
    let host = address(&lab).ip();
    let bench = format!("redis-benchmark -h {host} -p {PORT} -q");
    let cli = format!("redis-cli -h {host} -p {PORT}");
    let client = format!(
        "set -e; {cli} set key value; {cli} bgsave; {bench} -t set,get -n 2000 -c 20; \
         {bench} -t set,get -n 4000 -P 16 -c 10; {bench} -t set,get -n 100 -d 102400 -c 4; \
         test $({cli} get key) = value"
    );
    let (_server, output) = over_sdp(&lab, &server, &client);
    let (sent, received) = carried(&output, "redis-benchmark");
    assert!(sent > 10_000_000 && received > 10_000_000, "{output}");
}

#[test]
fn netns_sdp_memcached_keeps_values() {
    let lab = lab();
    let server = format!("exec memcached -u root -p {PORT} -U 0 -l 0.0.0.0");
    let client = format!(
        "printf 'set k 0 0 5\\r\\nhello\\r\\nget k\\r\\nquit\\r\\n' | nc {} {PORT} | tr -d '\\r'",
        address(&lab).ip()
    );
    let (_server, output) = over_sdp(&lab, &server, &client);
    assert!(output.contains("STORED\nVALUE k 0 5\nhello\nEND"), "{output}");
    assert!(carried(&output, "nc").1 > 0, "{output}");
}

#[test]
fn netns_sdp_nginx_serves_with_one_and_two_workers() {
    for workers in [1, 2] {
        let lab = lab();
        let file = random_file(&lab, "file", 100_000);
        let directory = file.parent().unwrap().display().to_string();
        let config = lab.file("nginx.conf");
        let text = format!(
            "worker_processes {workers}; daemon off; user root; pid {directory}/pid; error_log stderr;\n\
             events {{}}\n\
             http {{ access_log off; server {{ listen {PORT}; root {directory}; }} }}\n"
        );
        fs::write(&config, text).unwrap();
        let server = format!("exec nginx -p {directory} -c {}", config.display());
        let fetched = lab.file("fetched");
        let url = format!("http://{}/file", address(&lab));
        let (middle, part) = (lab.file("middle"), lab.file("part"));
        fs::write(&middle, &fs::read(&file).unwrap()[20_000..=89_999]).unwrap();
        let client = format!(
            "set -e; curl -sS -o {} {url}; curl -sS -r 20000-89999 -o {} {url}; ab -q -n 200 -c 8 {url}",
            fetched.display(),
            part.display()
        );
        let (_server, output) = over_sdp(&lab, &server, &client);
        assert_same(&file, &fetched);
        assert_same(&middle, &part);
        assert!(output.contains("Failed requests:        0"), "{output}");
        assert!(carried(&output, "ab").1 > 20_000_000, "{output}");
    }
}

/// Programs of which only one end is started over SDP: the kernel's TCP carries them. The tests of other programs loop over
/// [`WAYS`].
#[test]
fn netns_sdp_programs_with_one_end_over_sdp_use_tcp() {
    let home = lab();
    let host = address(&home).ip();
    let config = home.file("nginx.conf");
    let directory = config.parent().unwrap().display().to_string();
    fs::write(home.file("page"), "a page").unwrap();
    let text = format!(
        "daemon off; user root; pid {directory}/pid; error_log stderr; events {{}}\n\
         http {{ access_log off; server {{ listen {PORT}; root {directory}; }} }}\n"
    );
    fs::write(&config, text).unwrap();
    let url = format!("http://{host}:{PORT}/page");
    let programs = [
        (
            "iperf3",
            format!("iperf3 -s -1 -p {PORT}"),
            format!("iperf3 -c {host} -p {PORT} -n 2M"),
            "iperf Done",
        ),
        (
            "redis-benchmark",
            format!(
                "redis-server --port {PORT} --bind 0.0.0.0 --protected-mode no --save '' --dir {directory}"
            ),
            format!("redis-benchmark -h {host} -p {PORT} -q -t set -n 500 -c 5"),
            "requests per second",
        ),
        (
            "nc",
            format!("memcached -u root -p {PORT} -U 0 -l 0.0.0.0"),
            format!("sh -c 'printf \"set k 0 0 5\\r\\nhello\\r\\nquit\\r\\n\" | nc {host} {PORT}'"),
            "STORED",
        ),
        (
            "curl",
            format!("nginx -p {directory} -c {}", config.display()),
            format!("curl -sS {url}"),
            "a page",
        ),
        (
            "ab",
            format!("nginx -p {directory} -c {}", config.display()),
            format!("ab -q -n 50 -c 4 {url}"),
            "Failed requests:        0",
        ),
        (
            "sockperf",
            format!("sockperf server --tcp -i {host} -p {PORT}"),
            format!("sockperf ping-pong --tcp -i {host} -p {PORT} -t 1 -m 64"),
            "# dropped messages = 0",
        ),
        (
            "socat",
            format!("socat TCP-LISTEN:{PORT},reuseaddr,fork EXEC:cat"),
            format!("sh -c 'echo and back | socat - TCP:{host}:{PORT}'"),
            "and back",
        ),
    ];
    for (name, server, client, said) in programs {
        for way in &WAYS[1..] {
            let (_server, output) = run(&lab(), *way, &format!("exec {server}"), &format!("exec {client}"));
            assert!(output.contains(said), "{way:?}: {output}");
            assert_way(&output, name, *way);
        }
    }
}

/// wrk takes no descriptor above 10 and three for each connection.
#[test]
fn netns_sdp_wrk_keeps_its_few_connections() {
    let lab = lab();
    let file = random_file(&lab, "file", 1000);
    let directory = file.parent().unwrap().display().to_string();
    let config = lab.file("nginx.conf");
    let text = format!(
        "daemon off; user root; pid {directory}/pid; error_log stderr; events {{}}\n\
         http {{ access_log off; server {{ listen {PORT}; root {directory}; }} }}\n"
    );
    fs::write(&config, text).unwrap();
    let server = format!("exec nginx -p {directory} -c {}", config.display());
    let client = format!("exec wrk -t 1 -c 2 -d 1s http://{}/file", address(&lab));
    let (_server, output) = over_sdp(&lab, &server, &client);
    assert!(output.contains("Requests/sec") && !output.contains("Socket errors"), "{output}");
    assert!(carried(&output, "wrk").1 > 1000, "{output}");
}

#[test]
fn netns_sdp_sockperf_gets_its_answers() {
    let lab = lab();
    let host = address(&lab).ip();
    let server = format!("exec sockperf server --tcp -i {host} -p {PORT}");
    let client = format!("exec sockperf ping-pong --tcp -i {host} -p {PORT} -t 1 -m 64");
    let (_server, output) = over_sdp(&lab, &server, &client);
    assert!(output.contains("# dropped messages = 0"), "{output}");
    assert!(carried(&output, "sockperf").1 > 0, "{output}");
}

#[test]
fn netns_sdp_ssh_runs_a_command_through_inherited_sockets() {
    fs::create_dir_all("/run/sshd").unwrap();
    for way in WAYS {
        let lab = lab();
        let (file, back) = (random_file(&lab, "file", 300_001), lab.file("back"));
        let key = lab.file("key").display().to_string();
        let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &key]).status();
        assert!(made.unwrap().success());
        let sshd = format!(
            "exec /usr/sbin/sshd -D -e -f /dev/null -h {key} -p {PORT} -o StrictModes=no -o PidFile=none \
             -o AuthorizedKeysFile={key}.pub -o PermitRootLogin=yes -o UsePAM=no"
        );
        let client = format!(
            "exec ssh -p {PORT} -i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
             -o BatchMode=yes root@{} 'echo over $((3 * 14)) >&2; cat' < {} > {}",
            address(&lab).ip(),
            file.display(),
            back.display()
        );
        let (_server, output) = run(&lab, way, &sshd, &client);
        assert!(output.contains("over 42"), "{way:?}: {output}");
        assert_same(&file, &back);
        assert_way(&output, "ssh", way);
    }
}

/// Each client has a process of the server, which is not root and forked after the connection was accepted.
#[test]
fn netns_sdp_postgres_serves_its_benchmark() {
    let programs = fs::read_dir("/usr/lib/postgresql").unwrap().next().unwrap().unwrap().path().join("bin");
    let programs = programs.display();
    let rights = "+net_admin,+net_raw,+bpf,+ipc_lock";
    let user = format!(
        "setpriv --reuid=postgres --regid=postgres --clear-groups --inh-caps={rights} --ambient-caps={rights}"
    );
    for way in WAYS {
        let lab = lab();
        let directory = lab.file("pg").display().to_string();
        // The user must be able to read it.
        let copy = lab.file("libxwarp-sdp.so");
        fs::copy(library(), &copy).unwrap();
        let made = format!(
            "set -e; install -d -o postgres {directory}; cd /; \
             setpriv --reuid=postgres --regid=postgres --clear-groups \
             {programs}/initdb --no-sync -A trust -D {directory}; \
             echo 'host all all {}/32 trust' >> {directory}/pg_hba.conf",
            lab.address(Side::A, Family::V4)
        );
        lab.run(Side::B, "sh", &["-c", &made]).unwrap();
        let host = address(&lab).ip();
        let server = format!(
            "cd /; test -z \"$LD_PRELOAD\" || export LD_PRELOAD={}; \
             exec {user} {programs}/postgres -D {directory} -p {PORT} \
             -c listen_addresses={host} -c unix_socket_directories=",
            copy.display()
        );
        let (rows, back) = (lab.file("rows"), lab.file("back"));
        let numbers: Vec<String> = (0..40_000).map(|row| format!("{}\n", row * 7919 % 40_009)).collect();
        fs::write(&rows, numbers.concat()).unwrap();
        let to = format!("-h {host} -p {PORT} -U postgres");
        let bench = format!("{programs}/pgbench {to}");
        let client = format!(
            "set -e; cd /; {bench} -q -i postgres; {bench} -c 4 -T 1 postgres; \
             {programs}/psql -q {to} -c 'create table kept (row int)' -c '\\copy kept from {}' \
             -c '\\copy kept to {}' postgres",
            rows.display(),
            back.display()
        );
        let (_server, output) = run(&lab, way, &server, &client);
        assert!(output.contains("number of failed transactions: 0"), "{way:?}: {output}");
        assert_same(&rows, &back);
        assert_way(&output, "pgbench", way);
        assert_way(&output, "psql", way);
    }
}

#[test]
fn netns_sdp_rules_choose_the_way() {
    let lab = lab();
    let rules = lab.file("rules");
    fs::write(&rules, format!("use tcp connect nc *:{PORT}\nuse sdp connect * *:*\n")).unwrap();
    let server = format!("exec socat TCP-LISTEN:{PORT},reuseaddr,fork EXEC:cat");
    let mut server = shell(&lab, Side::B, By::Sdp, &server);
    wait_for_listener(&lab, By::Sdp, &mut server);
    let host = address(&lab).ip();
    let script = format!(
        "set -e; export LIBSDP_CONFIG_FILE={}; test $(echo tcp | nc -N {host} {PORT}) = tcp; \
         test $(echo sdp | socat - TCP:{host}:{PORT}) = sdp; \
         ! socat - TCP:{host}:{} < /dev/null",
        rules.display(),
        PORT + 1
    );
    let output = shell(&lab, Side::A, By::Sdp, &script).finish(LIMIT).unwrap();
    assert_eq!(carried(&output, "nc"), (0, 0), "{output}");
    assert_eq!(carried(&output, "socat"), (4, 4), "{output}");
    assert!(output.contains("refused"), "SDP only is refused where nobody speaks it: {output}");
}

/// Gives the interface of side A a second address.
fn second_address(lab: &Lab) -> IpAddr {
    let IpAddr::V4(own) = lab.address(Side::A, Family::V4) else { panic!("no IPv4") };
    let second = Ipv4Addr::from_bits(own.to_bits() + 100);
    lab.run(Side::A, "ip", &["address", "add", &format!("{second}/24"), "dev", INTERFACE]).unwrap();
    second.into()
}

/// Who floods a port mapper with questions and garbage gets few answers; others are answered meanwhile.
#[test]
fn netns_sdp_a_flooded_port_mapper_answers_others() {
    let lab = lab();
    let mut server =
        shell(&lab, Side::B, By::Sdp, &format!("exec socat TCP-LISTEN:{PORT},reuseaddr,fork EXEC:cat"));
    wait_for_listener(&lab, By::Sdp, &mut server);
    let (flooding, target) = (second_address(&lab), address(&lab));
    let question = || Question::new(SocketAddr::new(lab.address(Side::A, Family::V4), 1), target);
    let stop = AtomicBool::new(false);
    let flood = || {
        let socket = UdpSocket::bind((flooding, 0)).unwrap();
        socket.connect((target.ip(), 3935)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let request = Question::new(socket.local_addr().unwrap(), target).request();
        let (begin, mut answers) = (Instant::now(), 0);
        while !stop.load(Ordering::Relaxed) {
            for i in 0..100 {
                let _ = socket.send(if i % 2 == 0 { &request } else { &request[..i % 48] });
            }
            while socket.recv(&mut [0; 100]).is_ok() {
                answers += 1;
            }
            thread::sleep(Duration::from_millis(5));
        }
        (answers, begin.elapsed())
    };
    let (answers, time) = lab
        .within(Side::A, || {
            thread::scope(|scope| {
                let flooding = scope.spawn(flood);
                thread::sleep(Duration::from_millis(100));
                for _ in 0..20 {
                    assert!(matches!(question().ask(3), Ok(Asked::Accepted(..))), "not answered");
                    thread::sleep(Duration::from_millis(30));
                }
                stop.store(true, Ordering::Relaxed);
                flooding.join().unwrap()
            })
        })
        .unwrap();
    assert!(answers > 0 && answers <= 50 * (time.as_secs() + 2), "{answers} answers in {time:?}");
    let script = format!("test $(echo still | nc -N {} {PORT}) = still", target.ip());
    let output = shell(&lab, Side::A, By::Sdp, &script).finish(LIMIT).unwrap();
    assert_eq!(carried(&output, "nc"), (6, 6), "{output}");
}

/// Programs that end while data is on its way, and programs that read slowly, lose nothing.
#[test]
fn netns_sdp_the_end_of_a_program_waits_for_its_data() {
    let lab = lab();
    let file = random_file(&lab, "file", 4_000_000);
    let got = lab.file("got");
    let script =
        format!("exec socat -u TCP-LISTEN:{PORT},reuseaddr SYSTEM:'sleep 0.5; cat > {}'", got.display());
    let mut server = shell(&lab, Side::B, By::Sdp, &script);
    wait_for_listener(&lab, By::Sdp, &mut server);
    let python = lab.file("sends.py");
    fs::write(&python, SENDS).unwrap();
    let script = format!(
        "exec /usr/bin/python3 {} {} {PORT} {}",
        python.display(),
        address(&lab).ip(),
        file.display()
    );
    let output = shell(&lab, Side::A, By::Sdp, &script).finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
    assert_same(&file, &got);
    assert_eq!(carried(&output, "python3").0, 4_000_000, "{output}");
}

const SENDS: &str = include_str!("python/sends.py");

/// As with TCP, a program can read all data that arrived before a reset, even if more came than its socket can hold, and whether
/// or not the peer ended its direction first. A program that sends instead of reading notices the reset at once. One that only
/// polls notices it later (`netns_sdp_resets_reach_programs_that_do_not_read_and_half_closed_connections`).
#[test]
fn netns_sdp_data_before_a_reset_can_be_read() {
    let lab = lab();
    let program = lab.file("reset.py");
    fs::write(&program, READS_BEFORE_RESET).unwrap();
    let run = |role: &str| {
        format!("exec /usr/bin/python3 {} {role} {} {PORT}", program.display(), address(&lab).ip())
    };
    let mut server = shell(&lab, Side::B, By::Sdp, &run("read"));
    wait_for_listener(&lab, By::Sdp, &mut server);
    shell(&lab, Side::A, By::Sdp, &run("reset")).finish(LIMIT).unwrap();
    let read = server.finish(LIMIT).unwrap();
    assert!(read.starts_with("1000000 reset\n1000000 the end\nbroken\n"), "{read}");
}

const READS_BEFORE_RESET: &str = include_str!("python/reset_after_data.py");

/// The kernel resets the connections of a killed process, as it does for TCP: an error for the peer's program, not the end of
/// the stream.
#[test]
fn netns_sdp_a_killed_program_resets_its_peer() {
    let lab = lab();
    let program = lab.file("killed.py");
    fs::write(&program, KILLED).unwrap();
    let run = |by_role: &str| {
        format!("exec /usr/bin/python3 {} {by_role} {} {PORT}", program.display(), address(&lab).ip())
    };
    let mut server = shell(&lab, Side::B, By::Sdp, &run("serve"));
    wait_for_listener(&lab, By::Sdp, &mut server);
    let mut client = shell(&lab, Side::A, By::Sdp, &run("call"));
    client.wait_for("exchanged", LIMIT).unwrap();
    client.signal(Signal::KILL).unwrap();
    let served = server.finish(LIMIT).unwrap();
    assert!(served.contains("reset") && !served.contains("the end"), "{served}");
    // The frames that were recorded until shortly before the kill.
    let id = client.id();
    let capture = lab.captures().join(format!("python3-{id}-{INTERFACE}.pcapng"));
    let _ = client.wait(LIMIT);
    assert!(tshark::sdp_messages(&capture).unwrap().contains_key(&0xff), "no data in {}", capture.display());
}

const KILLED: &str = include_str!("python/killed.py");

/// At either end, the n-th thread of the library and all later ones cannot be started. The connection then uses TCP or is reset at both
/// ends; it is neither half-open nor, to a program, closed in order.
#[test]
fn netns_sdp_threads_that_cannot_be_started_leave_no_connection() {
    let lab = lab();
    let failing = compiled(&lab, "cc", "threads.c", &["-shared", "-fPIC"]);
    let program = lab.file("threads.py");
    fs::write(&program, THREADS).unwrap();
    let run = |role: &str, from: Option<u32>| {
        let limit = from.map(|n| format!("LD_PRELOAD=$LD_PRELOAD:{} FAIL_FROM={n}", failing.display()));
        let (limit, python) = (limit.unwrap_or_default(), program.display());
        format!("{limit} exec /usr/bin/python3 {python} {role} {} {PORT}", address(&lab).ip())
    };
    for failing in [Side::A, Side::B] {
        let mut resets = 0;
        for n in 1.. {
            let at = |side| (failing == side).then_some(n);
            let mut server = shell(&lab, Side::B, By::Sdp, &run("serve", at(Side::B)));
            server.wait_for("ready", LIMIT).unwrap();
            let called = shell(&lab, Side::A, By::Sdp, &run("call", at(Side::A))).finish(LIMIT).unwrap();
            shell(&lab, Side::A, By::Tcp, &run("stop", None)).finish(LIMIT).unwrap();
            let served = server.finish(LIMIT).unwrap();
            let text = format!("thread {n} at {failing:?}\n{called}\n{served}");
            assert!(!called.contains("wrong") && !served.contains("wrong"), "{text}");
            assert!(called.contains("reset") != called.contains("echoed"), "{text}");
            // A client whose connection was reset during its set-up has used TCP.
            resets += u32::from(called.contains("reset") || served.contains("reset"));
            if carried(&called, "python3") == (5, 5) {
                break;
            }
            assert!(n < 20, "the connection never uses SDP: {text}");
        }
        // The threads of the two directions, at least.
        assert!(resets >= 2, "{resets} resets at {failing:?}");
    }
}

const THREADS: &str = include_str!("python/threads.py");

/// Thousands of connections of one program at a time, and more in turn, keep their bytes and names.
#[test]
fn netns_sdp_a_program_has_thousands_of_connections() {
    let lab = lab();
    let output = serve_and_call(&lab, MANY);
    assert_eq!(carried(&output, "python3"), (52_000, 52_000), "{output}");
}

const MANY: &str = include_str!("python/many.py");

/// Names, options and readiness of a socket over SDP are those of a TCP socket.
#[test]
fn netns_sdp_a_python_program_sees_a_socket_as_ever() {
    let lab = lab();
    let program = lab.file("program.py");
    fs::write(&program, PROGRAM).unwrap();
    let run = format!("exec /usr/bin/python3 {}", program.display());
    let (local, peer) = (lab.address(Side::A, Family::V4), lab.address(Side::B, Family::V4));
    let server = format!("{run} serve {peer} {PORT}");
    let client = format!("{run} call {peer} {PORT} {local}");
    let (server, output) = over_sdp(&lab, &server, &client);
    assert!(output.contains("all is well"), "{output}");
    let served = server.finish(LIMIT).unwrap();
    assert!(served.contains(&format!("accepted {local}")), "{served}");
}

const PROGRAM: &str = include_str!("python/program.py");

/// A reset passes the relays of both ends, whatever these are doing: a program sees it as with TCP.
#[test]
fn netns_sdp_resets_reach_programs_that_do_not_read_and_half_closed_connections() {
    let lab = lab();
    serve_and_call(&lab, RESETS);
}

const RESETS: &str = include_str!("python/resets.py");

/// Urgent data of a program has the same outcome over SDP as over TCP: SIGURG, POLLPRI, the mark, `MSG_OOB` and `SO_OOBINLINE`.
#[test]
fn netns_sdp_urgent_data_has_the_outcome_of_tcp() {
    let outcomes = [By::Tcp, By::Sdp].map(|by| {
        let lab = lab();
        let program = lab.file("urgent.py");
        fs::write(&program, URGENT).unwrap();
        let run = format!("exec /usr/bin/python3 {}", program.display());
        let peer = lab.address(Side::B, Family::V4);
        let mut server = shell(&lab, Side::B, by, &format!("{run} serve {peer} {PORT}"));
        wait_for_listener(&lab, by, &mut server);
        let output = shell(&lab, Side::A, by, &format!("{run} call {peer} {PORT}")).finish(LIMIT).unwrap();
        let served = server.finish(LIMIT).unwrap();
        if by == By::Sdp {
            assert!(passed_by(&output) > 0, "nothing went straight to the stream: {output}");
        }
        let said = |text: &str| {
            text.lines().filter(|line| !line.contains("xwarp")).map(str::to_owned).collect::<Vec<_>>()
        };
        (said(&served), said(&output))
    });
    let [tcp, sdp] = outcomes;
    assert!(tcp.0.last().is_some_and(|line| line == "all is well"), "{tcp:?}");
    assert_eq!(sdp, tcp);
}

const URGENT: &str = include_str!("python/urgent.py");

/// Whatever calls a program mixes, those that go straight to the stream, those that use the kernel's socket, and those of a child that
/// has inherited it, the bytes keep their order.
#[test]
fn netns_sdp_bytes_keep_their_order_whatever_calls_a_program_mixes() {
    let lab = lab();
    let program = lab.file("mixed.py");
    fs::write(&program, MIXED).unwrap();
    let run = format!("exec /usr/bin/python3 {}", program.display());
    let peer = lab.address(Side::B, Family::V4);
    for seed in [1, 2] {
        let (server, output) = over_sdp(
            &lab,
            &format!("{run} serve {peer} {PORT} {seed}"),
            &format!("{run} call {peer} {PORT} {seed}"),
        );
        let served = server.finish(LIMIT).unwrap();
        assert!(output.contains("all is well"), "{output}\n{served}");
        assert!(passed_by(&output) > 0, "nothing went straight to the stream: {output}");
    }
}

/// Writes around the lengths from which bytes go by RDMA, of a program that waits and of one that does not; a peer that does not read
/// fills everything.
#[test]
fn netns_sdp_long_writes_keep_their_bytes() {
    let lab = lab();
    let output = serve_and_call(&lab, LONG);
    let (sent, _) = carried(&output, "python3");
    assert!(sent > 18 << 20, "not over SDP: {output}");
}

const LONG: &str = include_str!("python/long.py");

/// A read waits for as many bytes as `SO_RCVLOWAT` says, also in a program whose reads went straight to the stream before, or that has set
/// it before it connected.
#[test]
fn netns_sdp_reads_wait_for_the_low_mark() {
    serve_and_call(&lab(), LOW_MARK);
}

const LOW_MARK: &str = include_str!("python/low_mark.py");

/// The peer does not read. A handler without `SA_RESTART` ends a long write wherever in it the signal comes, a handler with it one that
/// has sent something; a signal that the program ignores ends none.
#[test]
fn netns_sdp_a_signal_ends_a_long_write() {
    let lab = lab();
    let client = compiled(&lab, "cc", "signals.c", &["-O1"]);
    let peer = lab.address(Side::B, Family::V4);
    let server = format!("exec /usr/bin/python3 -c '{SILENT}' {peer} {PORT}");
    let (_server, output) = over_sdp(&lab, &server, &format!("exec {} {peer} {PORT}", client.display()));
    assert!(output.contains("all is well"), "{output}");
    assert!(passed_by(&output) > 0, "{output}");
}

const SILENT: &str = include_str!("python/silent.py");

/// Long writes and reads pass the loopback by, whatever ways of waiting, flags and owners a program changes between. Each way of writing
/// meets each way of reading.
#[test]
fn netns_sdp_long_writes_and_reads_pass_the_loopback_by() {
    let lab = lab();
    let program = lab.file("program.py");
    fs::write(&program, PIECES).unwrap();
    let run = format!("exec /usr/bin/python3 {}", program.display());
    let peer = lab.address(Side::B, Family::V4);
    let (server, output) =
        over_sdp(&lab, &format!("{run} serve {peer} {PORT}"), &format!("{run} call {peer} {PORT}"));
    let served = server.finish(LIMIT).unwrap();
    assert!(output.contains("all is well"), "{output}\n{served}");
    assert!(served.contains("all is well"), "{served}\n{output}");
    let sent: u64 = output.lines().find_map(|line| line.strip_prefix("written ")?.parse().ok()).unwrap();
    for said in [&output, &served] {
        assert!(passed_by(said) > sent / 8, "of {sent} bytes in: {said}");
    }
}

const PIECES: &str = include_str!("python/pieces.py");

/// Bytes that went straight from and to streams, past the loopback.
fn passed_by(output: &str) -> u64 {
    let number = |line: &str| line.split("; ").nth(1)?.split_ascii_whitespace().next()?.parse::<u64>().ok();
    output.lines().filter(|line| line.contains("passed the loopback by")).filter_map(number).sum()
}

const MIXED: &str = include_str!("python/mixed.py");

/// Whoever closes, replaces, duplicates or passes on the descriptor of a connection, by whatever call: no byte goes to another file or
/// comes out of order.
#[test]
fn netns_sdp_descriptors_that_change_hands_keep_their_bytes() {
    let lab = lab();
    let output = serve_and_call(&lab, TRAPS);
    assert!(passed_by(&output) > 0, "nothing went straight to the stream: {output}");
}

const TRAPS: &str = include_str!("python/traps.py");

/// Compiles a program of this directory.
fn compiled(lab: &Lab, compiler: &str, source: &str, options: &[&str]) -> PathBuf {
    let to = lab.file(source.split('.').next().unwrap());
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/echo").join(source);
    let output = Command::new(compiler).arg(from).arg("-o").arg(&to).args(options).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    to
}

/// Runs groups of calls of a C program over TCP and over SDP, in which both ends print what the calls have done; returns the differences,
/// and the number of the server's bytes that passed the loopback by. The client uses `helper`, if there is one.
fn compared_with_tcp(
    lab: &Recorded,
    helper: Option<&SharedInterface>,
    program: &Path,
    groups: &[&str],
) -> (Vec<String>, u64) {
    let name = program.file_name().unwrap().to_str().unwrap();
    let (mut different, mut direct) = (Vec::new(), 0);
    for group in groups {
        let [tcp, sdp] = [By::Tcp, By::Sdp].map(|by| {
            let run =
                |role| format!("exec {} {role} {} {PORT} {group}", program.display(), address(lab).ip());
            let mut server = shell(lab, Side::B, by, &run("serve"));
            wait_for_listener(lab, by, &mut server);
            let mut call = command(lab, Side::A, by, &run("call"));
            call.envs(helper.map(|helper| ("XWARP_HELPER", helper.socket())));
            let called = Running::start(call).unwrap().finish(LIMIT);
            let served = server.finish(LIMIT);
            [called, served].map(|end| end.unwrap_or_else(|error| format!("{error:#}")))
        });
        let lines = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !line.contains("xwarp")).map(str::to_owned).collect()
        };
        for (tcp, sdp) in tcp.iter().zip(&sdp) {
            assert!(tcp.contains("all is well"), "{group} over TCP: {tcp}");
            let (expected, found) = (lines(tcp), lines(sdp));
            if expected != found {
                let at = expected.iter().zip(&found).take_while(|(a, b)| a == b).count();
                different.push(format!("{:?} instead of {:?}: {sdp}", found.get(at), expected.get(at)));
            }
        }
        if carried(&sdp[0], name).0 == 0 {
            different.push(format!("{group}: not over SDP: {}", sdp[0]));
        }
        direct += passed_by(&sdp[1]);
    }
    (different, direct)
}

/// Groups of calls and options of `calls.c`: each has the same outcome over SDP as over TCP.
const CALLS: [&str; 16] = [
    "checked", "vectors", "several", "files", "flags", "ready", "epoll", "control", "options", "limits",
    "linger", "connect", "bound", "signals", "forks", "inherit",
];

#[test]
fn netns_sdp_calls_and_options_have_the_outcome_of_tcp() {
    let lab = lab();
    let program = compiled(&lab, "cc", "calls.c", &["-O2", "-D_FORTIFY_SOURCE=2", "-Wall", "-Werror"]);
    let symbols = lab.run(Side::A, "nm", &["-D", program.to_str().unwrap()]).unwrap();
    for checked in ["__read_chk", "__recv_chk", "__recvfrom_chk", "__poll_chk", "__ppoll_chk"] {
        assert!(symbols.contains(checked), "the compiler does not use {checked}");
    }
    // A program binds to it.
    second_address(&lab);
    let (different, _) = compared_with_tcp(&lab, None, &program, &CALLS);
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// Sends a file by nc to the server `program`, which echoes it, in all [`WAYS`]. `first` is a command of the client before.
fn echoes(program: &str, first: &str) {
    for way in WAYS {
        let lab = lab();
        let (file, back) = (random_file(&lab, "file", 700_001), lab.file("back"));
        let nc = format!("nc -N {} {PORT} < {} > {}", address(&lab).ip(), file.display(), back.display());
        let (_server, output) = run(&lab, way, &format!("exec {program}"), &format!("set -e; {first} {nc}"));
        assert_same(&file, &back);
        let expected = if way == (By::Sdp, By::Sdp) { (700_001, 700_001) } else { (0, 0) };
        assert_eq!(carried(&output, "nc"), expected, "{program}, {way:?}: {output}");
        assert_way(&output, "nc", way);
        if !first.is_empty() {
            assert!(output.contains("all is well"), "{program}, {way:?}: {output}");
            assert_way(&output, "asio", way);
        }
    }
}

/// Groups of `sleeps.c`: reads that sleep, and the events that end them.
const SLEEPS: [&str; 7] = ["ends", "signals", "limits", "threads", "pair", "turns", "cancel"];

#[test]
fn netns_sdp_sleeping_reads_end_as_over_tcp() {
    let lab = lab();
    let program = compiled(&lab, "cc", "sleeps.c", &["-O2", "-Wall", "-Werror", "-pthread"]);
    let (different, _) = compared_with_tcp(&lab, None, &program, &SLEEPS);
    assert!(different.is_empty(), "{}", different.join("\n"));
    // The server writes as many bytes as it reads. Another thread may be faster than a read, but not always.
    let (different, direct) = compared_with_tcp(&lab, None, &program, &["data"]);
    assert!(different.is_empty(), "{}", different.join("\n"));
    assert!(direct > 200 * 16 * 3 / 2, "{direct} bytes passed the loopback by");
}

/// The same where the client has a device of a helper.
#[test]
fn netns_sdp_shared_sleeping_reads_end_as_over_tcp() {
    let lab = lab();
    let helper = SharedInterface::start(&lab, built("xwarp-helper").unwrap().to_str().unwrap(), &[]).unwrap();
    let program = compiled(&lab, "cc", "sleeps.c", &["-O2", "-Wall", "-Werror", "-pthread"]);
    let (different, _) = compared_with_tcp(&lab, Some(&helper), &program, &["ends", "threads"]);
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// Programs on event loops: the server echoes what nc and what a client on asio send.
#[test]
fn netns_sdp_programs_on_libevent_libuv_and_asio_echo() {
    let home = lab();
    let asio = compiled(&home, "g++", "asio.cpp", &["-pthread"]);
    let client = format!("{} {} {PORT};", asio.display(), address(&home).ip());
    let servers = [
        compiled(&home, "gcc", "libevent.c", &["-levent"]),
        compiled(&home, "gcc", "libuv.c", &["-luv"]),
        asio,
    ];
    for server in servers {
        echoes(&format!("{} {PORT}", server.display()), &client);
    }
}

/// The same for tokio, whose program is this test's own.
#[test]
fn netns_sdp_a_program_on_tokio_echoes() {
    let (program, test) = (env::current_exe().unwrap(), "echo_on_tokio");
    echoes(&format!("{} --ignored --exact --nocapture {test}", program.display()), "");
}

#[test]
#[ignore = "run as a process of its own by another test"]
fn echo_on_tokio() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_io().build().unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(("0.0.0.0", PORT)).await.unwrap();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
            });
        }
    });
}
