// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// What an administrator allows the clients of a switch: peers by their prefixes, and a rate. User space (`Policy` in
// policy.rs) fills the maps; without it everything is allowed.

#pragma once

#include "frame.h"

struct policy {
	__u64 ns_per_mib; /* what a client may send; 0: without limit */
	__u64 burst_ns;	  /* how far ahead of that rate it may be */
	__u32 peers;	  /* only those of `peers` are allowed */
	__u32 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct policy);
} policy SEC(".maps");

/* A prefix: its bits count from the IP version. */
struct prefix_key {
	__u32 bits;
	__u8 version;
	__u8 octets[16];
} __attribute__((packed));

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, __u8);
} peers SEC(".maps");

/* By slot: until when the client has used up its rate, in nanoseconds of the boot clock. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} used_until SEC(".maps");

static __always_inline struct policy *policy_of_switch(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&policy, &first);
}

static __always_inline bool is_allowed_peer(const struct address *address)
{
	struct policy *allowed = policy_of_switch();
	struct prefix_key key = { .bits = 8 * 17, .version = (__u8)address->version };

	if (!allowed || !allowed->peers)
		return true;
	__builtin_memcpy(key.octets, address->octets, sizeof(key.octets));
	return bpf_map_lookup_elem(&peers, &key);
}

/* Whether a client may send a frame now: the generic cell rate algorithm. The CPUs that send for one client at the same
 * time may each count from the same value; what they then have too much is bounded by their number. */
static __always_inline bool is_within_rate(struct xdp_md *ctx, __u32 slot)
{
	struct policy *allowed = policy_of_switch();
	__u64 *until, now, cost;

	if (!allowed || !allowed->ns_per_mib)
		return true;
	until = bpf_map_lookup_elem(&used_until, &slot);
	if (!until)
		return true;
	now = bpf_ktime_get_ns();
	if (*until > now + allowed->burst_ns)
		return false;
	cost = (bpf_xdp_get_buff_len(ctx) * allowed->ns_per_mib) >> 20;
	*until = (*until > now ? *until : now) + cost;
	return true;
}
