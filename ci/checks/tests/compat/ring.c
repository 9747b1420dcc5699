/* Each rank sends patterns of many lengths around the ring, and all sum vectors; every received byte is compared.
 *
 *     ring          prints "rank R of N: data are right" from each rank */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST = 1 << 20, NUMBERS = 50000 };

static unsigned char at(int rank, int length, int index) {
    return (unsigned char)(rank * 31 + length * 7 + index * 13);
}

static void fail(const char *what, int rank) {
    fprintf(stderr, "rank %d: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
    static const int lengths[] = {0, 1, 64, 4096, 16384, 100001, LARGEST};
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    unsigned char *out = malloc(LARGEST), *in = malloc(LARGEST);
    for (int round = 0; round < 4; round++)
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            int length = lengths[i], count;
            for (int k = 0; k < length; k++)
                out[k] = at(rank, length, k + round);
            memset(in, 0, LARGEST);
            MPI_Status status;
            MPI_Sendrecv(out, length, MPI_BYTE, next, round, in, LARGEST, MPI_BYTE, previous, round, MPI_COMM_WORLD, &status);
            MPI_Get_count(&status, MPI_BYTE, &count);
            if (count != length)
                fail("a message of another length", rank);
            for (int k = 0; k < length; k++)
                if (in[k] != at(previous, length, k + round))
                    fail("other bytes than were sent", rank);
        }
    long long *numbers = malloc(NUMBERS * sizeof *numbers), *sums = malloc(NUMBERS * sizeof *sums);
    for (int i = 0; i < NUMBERS; i++)
        numbers[i] = (long long)(rank + 1) * i;
    MPI_Allreduce(numbers, sums, NUMBERS, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < NUMBERS; i++)
        if (sums[i] != (long long)ranks * (ranks + 1) / 2 * i)
            fail("another sum", rank);
    MPI_Finalize();
    printf("rank %d of %d: data are right\n", rank, ranks);
    return 0;
}
