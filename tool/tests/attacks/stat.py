"""`xwarp stat` run by root, and what an unprivileged user puts into /run/user/UID. Argument: the program.

Runs as root in a mount namespace of its own (`unshare --mount`), where /run is empty. Fails by an assertion."""
import multiprocessing, os, shutil, socket, subprocess, sys, time

XWARP, UID, LIMIT = sys.argv[1], 65534, 30
USER = f"/run/user/{UID}"
DIRECTORY = f"{USER}/xwarp-devices"
ANSWER = b"xwarp 1\npid 1\ninterface eth0\nprocess \x1b]0;owned\x07\x1b[2J\x1b[31mhello\x1b[0m\nend\n"


def stat():
    """Output and duration of the program, which must end by itself."""
    begin = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XWARP")}
    done = subprocess.run([XWARP, "stat"], capture_output=True, timeout=LIMIT, env=environment)
    return done.stdout + done.stderr, time.monotonic() - begin


def as_user(work):
    """Runs `work` as the user, in a process that is killed at the end; returns when it is ready."""
    ready, is_ready = multiprocessing.Pipe()

    def child():
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
        work(lambda: ready.send(None))

    process = multiprocessing.Process(target=child, daemon=True)
    process.start()
    assert is_ready.poll(LIMIT)
    return process


def listener(name, backlog):
    os.mkdir(DIRECTORY, 0o700)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{DIRECTORY}/{name}")
    server.listen(backlog)
    return server


def links(ready):
    os.symlink("/run/etc", DIRECTORY)
    ready()


def links_a_file(ready):
    os.mkdir(DIRECTORY, 0o700)
    os.symlink("/run/etc/10-admin-policy-x", f"{DIRECTORY}/10-admin-0")
    open(f"{DIRECTORY}/12-regular-0", "w").close()
    os.utime(f"{DIRECTORY}/12-regular-0", (1, 1))
    ready()


def accepts_nothing(ready):
    server = listener("1-eth0-0", 0)
    clients = []
    for _ in range(4):
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        try:
            client.connect(f"{DIRECTORY}/1-eth0-0")
        except BlockingIOError:
            break
        clients.append(client)
    ready()
    time.sleep(10 * LIMIT)
    server.close()


def drips(ready):
    server = listener("1-eth0-0", 5)
    ready()
    while True:
        client, _ = server.accept()
        try:
            while True:
                client.sendall(b"x")
                time.sleep(0.5)
        except OSError:
            pass


def escapes(ready):
    server = listener("1-eth0-0", 5)
    ready()
    while True:
        client, _ = server.accept()
        try:
            client.recv(99)
            client.sendall(ANSWER)
        except OSError:
            pass
        client.close()


def empty():
    shutil.rmtree("/run/user", ignore_errors=True)
    os.makedirs(USER)
    os.chown(USER, UID, UID)
    os.chmod(USER, 0o700)


multiprocessing.set_start_method("fork")
subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
os.makedirs("/run/etc")
files = ["10-admin-policy-x", "70-persistent-net.rules", "90-cloud-init-users", "README"]
for name in files:
    open(f"/run/etc/{name}", "w").close()
    os.utime(f"/run/etc/{name}", (1, 1))

for put in [links, links_a_file]:
    empty()
    as_user(put).join()
    stat()
    assert sorted(os.listdir("/run/etc")) == sorted(files), f"{put.__name__}: files of root are gone"
assert os.path.exists(f"{DIRECTORY}/12-regular-0"), "a reader removes a file of another user"

for answers in [accepts_nothing, drips]:
    empty()
    process = as_user(answers)
    _, seconds = stat()
    print(answers.__name__, f"{seconds:.1f} s")
    process.kill()

empty()
process = as_user(escapes)
text, _ = stat()
process.kill()
assert b"hello" in text, text
assert b"\x1b" not in text and b"\x07" not in text, text
print("passed")
