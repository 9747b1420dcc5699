/* An initiator of iSER by libiscsi: "iser PORTAL TARGET ROUNDS SEED". The first round fills the disk. Each logs in, reads all that was written,
 * writes blocks of random length to random places, reads random parts, compares, and logs out. */
#include <iscsi/iscsi.h>
#include <iscsi/scsi-lowlevel.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 512
#define BLOCKS 4096
#define MOST 256
#define STEPS 60
#define LUN 1
#define INITIATOR "iqn.2026-11.example:initiator"

#define CHECK(what)                                                                                           \
	do {                                                                                                  \
		if (!(what)) {                                                                                \
			printf("line %d: %s does not hold: %s\n", __LINE__, #what, iscsi_get_error(iscsi));   \
			exit(1);                                                                              \
		}                                                                                             \
	} while (0)

/* What the target must have. */
static unsigned char mirror[BLOCKS * BLOCK];
static uint64_t state;

static uint32_t chance(uint32_t below)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(state >> 33) % below;
}

static void read_back(struct iscsi_context *iscsi, uint32_t at, uint32_t blocks)
{
	struct scsi_task *task = iscsi_read16_sync(iscsi, LUN, at, blocks * BLOCK, BLOCK, 0, 0, 0, 0, 0);

	CHECK(task && task->status == SCSI_STATUS_GOOD);
	CHECK(task->datain.size == (int)(blocks * BLOCK));
	CHECK(memcmp(task->datain.data, mirror + at * BLOCK, blocks * BLOCK) == 0);
	scsi_free_scsi_task(task);
}

static void write_random(struct iscsi_context *iscsi, uint32_t at, uint32_t blocks)
{
	for (uint32_t i = 0; i < blocks * BLOCK; i++)
		mirror[at * BLOCK + i] = chance(256);
	struct scsi_task *task =
		iscsi_write16_sync(iscsi, LUN, at, mirror + at * BLOCK, blocks * BLOCK, BLOCK, 0, 0, 0, 0, 0);

	CHECK(task && task->status == SCSI_STATUS_GOOD);
	scsi_free_scsi_task(task);
}

static void round_of(const char *portal, const char *target, int is_first)
{
	struct iscsi_context *iscsi = iscsi_create_context(INITIATOR);

	CHECK(iscsi != NULL);
	CHECK(iscsi_init_transport(iscsi, ISER_TRANSPORT) == 0);
	CHECK(iscsi_set_targetname(iscsi, target) == 0);
	CHECK(iscsi_set_session_type(iscsi, ISCSI_SESSION_NORMAL) == 0);
	iscsi_set_timeout(iscsi, 30);
	CHECK(iscsi_full_connect_sync(iscsi, portal, LUN) == 0);
	printf("logged in\n");
	for (uint32_t at = 0; is_first && at < BLOCKS; at += MOST)
		write_random(iscsi, at, MOST);
	for (uint32_t at = 0; at < BLOCKS; at += MOST)
		read_back(iscsi, at, MOST);
	for (int step = 0; step < STEPS; step++) {
		uint32_t blocks = 1 + chance(MOST), at = chance(BLOCKS - blocks + 1);

		if (chance(2))
			write_random(iscsi, at, blocks);
		else
			read_back(iscsi, at, blocks);
	}
	printf("verified\n");
	CHECK(iscsi_logout_sync(iscsi) == 0);
	printf("logged out\n");
	iscsi_destroy_context(iscsi);
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	state = strtoull(argv[4], NULL, 0);
	for (int i = 0; i < atoi(argv[3]); i++)
		round_of(argv[1], argv[2], i == 0);
	printf("done\n");
	return 0;
}
