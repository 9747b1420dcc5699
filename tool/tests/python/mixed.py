"""Calls drawn by a seed, also of a child, keep the order of the bytes.

    python3 mixed.py serve|call ADDRESS PORT SEED
"""
import os, random, select, socket, subprocess, sys, tempfile, threading, time
role, host, port, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
TOTAL = 1 << 20

def byte(at):
    return (at * 31 + (at >> 8) * 7 + seed) & 255

def pattern(at, n):
    return bytes(byte(i) for i in range(at, at + n))

def send(s, data, random):
    how = random.randrange(8)
    if how == 0:
        return s.send(data)
    if how == 1:
        return os.write(s.fileno(), data)
    if how == 2:
        return os.writev(s.fileno(), [data[:7], b'', data[7:]])
    if how == 3:
        return s.sendmsg([data[:100], data[100:]])
    if how == 4:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            return os.sendfile(s.fileno(), file.fileno(), 0, len(data))
    if how == 5:
        try:
            return s.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
    if how == 6 and random.randrange(40) == 0:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            subprocess.run(['cat', file.name], stdout=s, check=True)
            return len(data)
    s.sendall(data)
    return len(data)

def receive(s, n, random):
    how = random.randrange(8)
    if how == 0:
        return os.read(s.fileno(), n)
    if how == 1:
        first, second = bytearray(3), bytearray(n)
        got = os.readv(s.fileno(), [first, second])
        return bytes(first + second)[:got]
    if how == 2:
        return s.recvmsg(n)[0]
    if how == 3:
        seen = s.recv(n, socket.MSG_PEEK)
        data = s.recv(len(seen)) if seen else seen
        assert seen.startswith(data) or data.startswith(seen)
        return data
    if how == 4:
        select.select([s], [], [])
        return s.recv(n)
    if how == 5:
        while True:
            try:
                return s.recv(n, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if random.randrange(50) == 0:
                    poll = select.poll()
                    poll.register(s, select.POLLIN)
                    poll.poll()
    if how == 6:
        return s.recv(min(n, 5), socket.MSG_WAITALL) if n > 5 else s.recv(n)
    return s.recv(n)

def send_all(s, random):
    at = 0
    while at < TOTAL:
        n = min(TOTAL - at, random.choice([1, 64, 64, 64, 1000, 5000, 100000]))
        data = pattern(at, n)
        at += send(s, data, random)
        if random.randrange(20) == 0:
            time.sleep(random.choice([0, 0.0001, 0.003]))
    s.shutdown(socket.SHUT_WR)

if role == 'serve':
    listener = socket.create_server((host, port))
    s, _ = listener.accept()
else:
    s = socket.create_connection((host, port))
# Requests and answers first: they are what passes the loopback by.
def exactly(n):
    got = b''
    while len(got) < n:
        got += s.recv(n - len(got))
    return got

for i in range(300):
    if role == 'serve':
        assert exactly(64) == pattern(i, 64)
        s.send(pattern(i + 1, 64))
    else:
        s.send(pattern(i, 64))
        assert exactly(64) == pattern(i + 1, 64)
writer = threading.Thread(target=send_all, args=(s, random.Random(seed * 2 + (role == 'serve'))))
writer.start()
at, own = 0, random.Random(seed * 7 + (role == 'serve'))
while True:
    data = receive(s, own.choice([1, 64, 1000, 30000, 200000]), own)
    if not data:
        break
    assert data == pattern(at, len(data)), ('other bytes at', at, len(data))
    at += len(data)
assert at == TOTAL, at
writer.join()
print('all is well', flush=True)
