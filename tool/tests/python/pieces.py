"""Long writes and reads, whatever ways of waiting, flags and owners change in between.

    python3 pieces.py serve|call ADDRESS PORT
"""
import array, fcntl, hashlib, os, random, select, socket, sys, tempfile, termios, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
TOTAL = 4 << 20
CONTENT = random.Random(16).randbytes(TOTAL)

class Way:
    def __init__(self, s):
        self.s, self.at = s, 0

    def write(self, n):
        return self.s.send(memoryview(CONTENT)[self.at:self.at + n])

    def wrote(self, n):
        self.at += n

    # 0 when all was read: nothing more comes before the answer to it.
    def read(self, n, flags=0):
        if self.at == TOTAL:
            return 0
        data = self.s.recv(n, flags)
        assert data == CONTENT[self.at:self.at + len(data)], ('other bytes at', self.at, len(data))
        if not flags & socket.MSG_PEEK:
            self.at += len(data)
        return len(data)

def write_waiting(way):
    while way.at < TOTAL:
        way.wrote(way.write(1 << 20))

def write_by_select(way):
    way.s.setblocking(False)
    while way.at < TOTAL:
        select.select([], [way.s], [])
        try:
            for _ in range(10):
                way.wrote(way.write(1 << 20))
        except BlockingIOError:
            pass

def write_by_edges(way):
    way.s.setblocking(False)
    edges = select.epoll()
    edges.register(way.s, select.EPOLLOUT | select.EPOLLET)
    while way.at < TOTAL:
        edges.poll(20) or exit('no edge')
        try:
            while way.at < TOTAL:
                way.wrote(way.write(700001))
        except BlockingIOError:
            pass

def write_lengths(way):
    lengths = random.Random(5)
    while way.at < TOTAL:
        n = min(TOTAL - way.at, lengths.choice([1, 100, 32768, 40000, 100000, 1 << 18, 1 << 20]))
        how = lengths.randrange(4)
        if how == 0:
            with tempfile.TemporaryFile() as file:
                file.write(CONTENT[way.at:way.at + n])
                file.flush()
                way.wrote(os.sendfile(way.s.fileno(), file.fileno(), 0, n))
        elif how == 1:
            part = memoryview(CONTENT)[way.at:way.at + n]
            way.wrote(way.s.sendmsg([part[:n // 3], b'', part[n // 3:n // 2], part[n // 2:]]))
        else:
            way.wrote(way.write(n))

def write_by_a_child(way):
    while way.at < TOTAL // 2:
        way.wrote(way.write(1 << 20))
    child = os.fork()
    if child == 0:
        write_waiting(way)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def write_by_a_duplicate(way):
    while way.at < TOTAL // 2:
        way.wrote(way.write(1 << 19))
    way.s = way.s.dup()
    write_waiting(way)

def read_waiting(way):
    while way.read(1 << 20):
        pass

def read_by_select(way):
    way.s.setblocking(False)
    while way.at < TOTAL:
        select.select([way.s], [], [], 20)[0] or exit('never readable')
        try:
            while True:
                if way.read(1 << 20) == 0:
                    return
        except BlockingIOError:
            pass

def read_by_edges(way):
    way.s.setblocking(False)
    edges = select.epoll()
    edges.register(way.s, select.EPOLLIN | select.EPOLLET)
    while way.at < TOTAL:
        edges.poll(20) or exit('no edge')
        try:
            while True:
                if way.read(300000) == 0:
                    return
        except BlockingIOError:
            pass

def read_lengths(way):
    lengths = random.Random(6)
    while way.at < TOTAL:
        n = lengths.choice([1, 100, 4096, 5000, 32768, 100000, 1 << 20])
        how = lengths.randrange(6)
        if how == 0:
            way.read(n, socket.MSG_PEEK)
        if how == 1:
            n = min(n, TOTAL - way.at)
            assert way.read(n, socket.MSG_WAITALL) == n
        elif how == 2:
            # Level-triggered readiness stays true while something is left.
            select.select([way.s], [], [], 20)[0] or exit('never readable')
            way.read(n)
        elif how == 3:
            first, second = bytearray(7), bytearray(n)
            got = way.s.recvmsg_into([first, second])[0]
            assert bytes(first + second)[:got] == CONTENT[way.at:way.at + got]
            way.at += got
        else:
            way.read(n)

def read_what_is_there(way):
    while way.at < TOTAL:
        select.select([way.s], [], [], 20)[0] or exit('never readable')
        there = array.array('i', [0])
        fcntl.ioctl(way.s, termios.FIONREAD, there)
        way.read(there[0])
        way.read(1 << 18)

def read_above_a_mark(way):
    while way.at < TOTAL:
        way.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(100000, TOTAL - way.at))
        select.select([way.s], [], [], 20)[0] or exit('never readable')
        way.read(1 << 18)

def read_late(way):
    while way.read(1 << 18):
        time.sleep(0.06 if way.at < TOTAL // 4 else 0)

def read_by_a_child(way):
    while way.at < TOTAL // 2:
        way.read(1 << 18)
    child = os.fork()
    if child == 0:
        read_waiting(way)
        os._exit(0 if way.at == TOTAL else 1)
    assert os.waitpid(child, 0)[1] == 0
    way.at = TOTAL

def read_by_a_duplicate(way):
    while way.at < TOTAL // 2:
        way.read(1 << 18)
    way.s = way.s.dup()
    read_waiting(way)

WRITES = [write_waiting, write_by_select, write_by_edges, write_lengths, write_by_a_duplicate, write_by_a_child]
READS = [read_waiting, read_by_select, read_by_edges, read_lengths, read_what_is_there, read_above_a_mark, read_late,
         read_by_a_duplicate, read_by_a_child]
if role == 'serve':
    listener = socket.create_server((host, port))
ways = [(write, read) for write in WRITES for read in READS]
for write, read in ways:
    if role == 'serve':
        way = Way(listener.accept()[0])
        read(way)
        assert way.at == TOTAL, (write, read, way.at)
        way.s.setblocking(True)
        way.s.sendall(b'k')
        assert way.s.recv(1) == b''
    else:
        way = Way(socket.create_connection((host, port)))
        write(way)
        way.s.setblocking(True)
        assert way.s.recv(1) == b'k', (write, read)
    way.s.close()
print('written', TOTAL * len(ways))
print('all is well', flush=True)
