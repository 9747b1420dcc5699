"""Who is who: programs that show the names of their connections, and which program got one.

serve NAME HOST PORT [reuse] [six|both]    answers each connection with "NAME sees ADDRESS PORT", and prints it
execute HOST PORT                          prints what executed children see as the peer of an accepted connection
leave HOST PORT                            closes its listener after one connection, and goes on
ask HOST PORT COUNT [slowly] [device NAME]          connects and prints the answers
local HOST PORT SOURCE SOURCE_PORT         the same once, from an address and a port of its choice
send HOST PORT                             sends 300 bytes and counts those that come back
pending HOST PORT                          a child connects to a closed port before it accepts what waited in the parent
"""

import os
import socket
import subprocess
import sys
import time


def listen(host, port, words=()):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if "reuse" in words:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, "six" in words)
    for _ in range(200):
        try:
            listener.bind((host, int(port)))
            break
        except OSError:
            time.sleep(0.05)
    listener.listen(64)
    print("listens", flush=True)
    return listener


def kernels_peer(connection):
    inode = os.fstat(connection.fileno()).st_ino
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}"):
            if f" {inode} " in line:
                return int(line.split()[2].split(":")[1], 16)
    return 0


def serve(name, host, port, *words):
    listener = listen(host, port, words)
    while True:
        connection, peer = listener.accept()
        shown = f"{name} sees {peer[0]} {peer[1]}"
        print(shown, "leg", kernels_peer(connection), flush=True)
        connection.sendall(shown.encode())
        connection.close()


def execute(host, port):
    listener = listen(host, port)
    connection, _ = listener.accept()
    show = "import socket; s = socket.socket(fileno=0); print('child', *s.getpeername(), *s.getsockname())"
    with_library = [sys.executable, "-c", show]
    for kind, command, close in (
        ("keeps", with_library, False),
        ("closes", with_library, True),
        ("bare", ["env", "-u", "LD_PRELOAD", *with_library], False),
    ):
        done = subprocess.run(command, stdin=connection, stdout=subprocess.PIPE, close_fds=close, check=True)
        print(kind, done.stdout.decode().strip(), flush=True)
    connection.sendall(b"shown")
    connection.close()


def leave(host, port):
    listener = listen(host, port)
    connection, _ = listener.accept()
    listener.close()
    connection.sendall(b"once")
    connection.close()
    print("left", flush=True)
    time.sleep(60)


def ask(host, port, count, *words):
    for _ in range(int(count)):
        client = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        client.settimeout(20)
        begin = time.monotonic()
        try:
            if "device" in words:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, words[-1].encode())
            client.connect((host, int(port)))
            took = time.monotonic() - begin
            print("answer", client.recv(100).decode(), "late" if took > 2 else "soon", flush=True)
        except OSError as error:
            print("answer", type(error).__name__, flush=True)
        client.close()
        if "slowly" in words:
            time.sleep(0.25)


def local(host, port, source, source_port):
    client = socket.socket()
    client.settimeout(20)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for _ in range(100):
        try:
            client.bind((source, int(source_port)))
            break
        except OSError:
            time.sleep(0.05)
    client.connect((host, int(port)))
    print("answer", client.recv(100).decode(), flush=True)


def pending(host, port):
    listener = listen(host, port)
    while not any(line.split()[1].endswith(f":{int(port):04X}") and line.split()[3] == "01" for line in list(open("/proc/net/tcp"))[1:]):
        time.sleep(0.05)
    if os.fork() == 0:
        refused = socket.socket()
        print("refused", refused.connect_ex(("127.0.0.1", 1)) != 0, flush=True)
        connection, _ = listener.accept()
        connection.settimeout(20)
        got = b""
        while len(got) < 300:
            part = connection.recv(300)
            if not part:
                break
            got += part
        connection.sendall(got)
        connection.close()
        os._exit(0)
    os.wait()
    time.sleep(1)


def send(host, port):
    client = socket.create_connection((host, int(port)), timeout=20)
    for _ in range(3):
        client.sendall(b"x" * 100)
        time.sleep(0.2)
    got = b""
    while part := client.recv(300):
        got += part
    print(f"got {len(got)} of 300", flush=True)


globals()[sys.argv[1]](*sys.argv[2:])
