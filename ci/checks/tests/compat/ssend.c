// Two ranks send to each other in turn: buffered, standard and synchronous sends of numbers that the receiver compares. Synchronous
// ones end with an acknowledgement, for which Open MPI's mtl ofi needs CQ data.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 100, SENDS = 3 };

int main(int count, char **arguments)
{
	static char buffer[4096];
	int rank, ranks, size = sizeof buffer;
	void *detached;
	MPI_Init(&count, &arguments);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks != 2)
		MPI_Abort(MPI_COMM_WORLD, 2);
	MPI_Buffer_attach(buffer, size);
	for (int round = 0; round < 2 * ROUNDS; round++) {
		int number = SENDS * round;
		if (round % 2 == rank) {
			MPI_Bsend(&number, 1, MPI_INT, !rank, 0, MPI_COMM_WORLD);
			number++;
			MPI_Send(&number, 1, MPI_INT, !rank, 0, MPI_COMM_WORLD);
			number++;
			MPI_Ssend(&number, 1, MPI_INT, !rank, 0, MPI_COMM_WORLD);
			continue;
		}
		for (int send = 0; send < SENDS; send++) {
			int got = -1;
			MPI_Recv(&got, 1, MPI_INT, !rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			if (got != number + send)
				MPI_Abort(MPI_COMM_WORLD, 3);
		}
	}
	MPI_Buffer_detach(&detached, &size);
	printf("rank %d: %d rounds\n", rank, 2 * ROUNDS);
	MPI_Finalize();
	return 0;
}
