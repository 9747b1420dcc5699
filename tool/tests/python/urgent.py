"""Prints the outcome of urgent data: SIGURG, POLLPRI, the mark, MSG_OOB and SO_OOBINLINE.

    python3 urgent.py serve|call ADDRESS PORT
"""
import fcntl, os, select, signal, socket, struct, sys
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
signals = 0

def urgent(number, frame):
    global signals
    signals += 1

signal.signal(signal.SIGURG, urgent)

def own(s):
    fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())

def at_mark(s):
    return struct.unpack('i', fcntl.ioctl(s, 0x8905, bytes(4)))[0] == 1

def wait_for_urgent(s):
    poll = select.poll()
    poll.register(s, select.POLLPRI)
    return [events & select.POLLPRI != 0 for _, events in poll.poll(50000)]

def to_mark(s):
    data = b''
    while not at_mark(s):
        data += s.recv(100)
    return data

def exactly(s, n):
    data = b''
    while len(data) < n:
        data += s.recv(n - len(data)) or exit('the stream has ended')
    return data

def pings(s, first):
    for i in range(200):
        if first:
            s.sendall(bytes([i]) * 64)
        assert exactly(s, 64) == bytes([i]) * 64
        if not first:
            s.sendall(bytes([i]) * 64)

def speak(s):
    for before, byte, after in [(b'abc', b'X', b'def'), (b'ghi', b'Y', b'jkl')]:
        assert exactly(s, 1) == b'r'
        s.sendall(before)
        print('sent', s.send(byte, socket.MSG_OOB))
        assert exactly(s, 1) == b'n'
        s.sendall(after)

def listen(s):
    s.sendall(b'r')
    print('urgent', wait_for_urgent(s), 'before', to_mark(s), 'signals', signals > 0)
    print('out of line', s.recv(1, socket.MSG_OOB))
    try:
        s.recv(1, socket.MSG_OOB)
    except OSError as error:
        print('again', error.errno)
    s.sendall(b'n')
    print('after', exactly(s, 3), at_mark(s))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    s.sendall(b'r')
    print('urgent', wait_for_urgent(s), 'before', to_mark(s))
    s.sendall(b'n')
    print('in line', exactly(s, 4), at_mark(s))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 0)

BULK = bytes(i * 7 & 255 for i in range(400001))
if role == 'serve':
    listener = socket.create_server((host, port))
    s, _ = listener.accept()
    own(s)
    pings(s, False)
    listen(s)
    speak(s)
    s.sendall(BULK)
    pings(s, False)
    print('end', s.recv(1))
else:
    s = socket.create_connection((host, port))
    own(s)
    pings(s, True)
    speak(s)
    listen(s)
    print('bulk', exactly(s, len(BULK)) == BULK)
    pings(s, True)
    s.close()
print('all is well', flush=True)
