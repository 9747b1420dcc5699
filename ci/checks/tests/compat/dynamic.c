/* A program that is not linked with the libraries: it loads them by name and looks the functions up, as NCCL does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>

int main(void)
{
	void *verbs = dlopen("libibverbs.so.1", RTLD_NOW), *cm = dlopen("librdmacm.so.1", RTLD_NOW);
	struct ibv_device **(*get_device_list)(int *);
	const char *(*get_device_name)(struct ibv_device *);
	struct rdma_event_channel *(*create_event_channel)(void);
	int number = 0;

	if (!verbs || !cm) {
		puts(dlerror());
		return 1;
	}
	get_device_list = dlvsym(verbs, "ibv_get_device_list", "IBVERBS_1.1");
	get_device_name = dlsym(verbs, "ibv_get_device_name");
	create_event_channel = dlvsym(cm, "rdma_create_event_channel", "RDMACM_1.0");
	if (!get_device_list || !get_device_name || !create_event_channel)
		return 2;
	struct ibv_device **list = get_device_list(&number);
	if (number < 1 || !create_event_channel())
		return 3;
	printf("device %s\n", get_device_name(list[0]));
	return 0;
}
