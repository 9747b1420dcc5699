"""Long writes and reads by all calls keep their bytes.

    python3 long.py serve|call ADDRESS PORT
"""
import hashlib, select, socket, sys, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
LENGTHS = [1 << 20, 32768, 32767, 700001, (1 << 19) + 1, 100000, 3 << 20, 65536, 1 << 19]

def pattern(i, n):
    return (bytes((i * 7 + j) & 255 for j in range(251)) * (n // 251 + 1))[:n]

if role == 'serve':
    listener = socket.create_server((host, port))
    s, _ = listener.accept()
    for turn in range(3):
        for i, n in enumerate(LENGTHS):
            data = b''
            while len(data) < n:
                data += s.recv(n - len(data)) or exit('the stream has ended')
            assert data == pattern(i, n), (turn, i)
        s.sendall(b'k')
    # Does not read until the peer cannot write any more.
    assert s.recv(1) == b'f'
    s.sendall(b'f')
    stop = int.from_bytes(listener.accept()[0].recv(8), 'big')
    digest, got = hashlib.sha256(), 0
    while got < stop:
        data = s.recv(1 << 20)
        digest.update(data)
        got += len(data)
    s.sendall(digest.digest())
    assert s.recv(1) == b''
else:
    s = socket.create_connection((host, port))
    for turn in range(3):
        s.setblocking(turn != 1)
        for i, n in enumerate(LENGTHS):
            data = memoryview(pattern(i, n))
            while data:
                select.select([], [s], [])
                data = data[s.send(data):]
        select.select([s], [], [])
        assert s.recv(1) == b'k'
    s.setblocking(True)
    s.sendall(b'f')
    assert s.recv(1) == b'f'
    s.setblocking(False)
    digest, sent, full = hashlib.sha256(), 0, 0
    while full < 20:
        try:
            data = pattern(sent & 255, 1 << 20)
            n = s.send(data)
            digest.update(data[:n])
            sent += n
            full = 0
        except BlockingIOError:
            full += 1
            time.sleep(0.05)
    other = socket.create_connection((host, port))
    other.sendall(sent.to_bytes(8, 'big'))
    s.setblocking(True)
    got = b''
    while len(got) < 32:
        got += s.recv(32 - len(got))
    assert got == digest.digest()
    s.shutdown(socket.SHUT_WR)
print('all is well', flush=True)
