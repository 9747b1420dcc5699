// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// The steering program of xwarp: frames of known TCP four-tuples, SYNs to listening ports and ICMP
// errors that quote a known four-tuple go to the AF_XDP socket of the queue they arrived on. Every
// other frame goes to the kernel as it came. The program never writes to a frame.
//
// The maps are filled by user space (`SteeringProgram` in lib.rs) and live as long as it does.

#include <stdbool.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAX_VLANS 2
#define VLAN_ID_MASK 0x0fff
#define IP_FRAGMENT_MASK 0x3fff /* more fragments, and the offset */
#define IP_OFFSET_MASK 0x1fff
/* Bytes of a quoted TCP header that RFC 792 promises: both ports and the sequence number. */
#define QUOTED_TCP_BYTES 8

enum icmp_v4_type { ICMP_UNREACHABLE = 3, ICMP_TIME_EXCEEDED = 11, ICMP_PARAMETER = 12 };
enum icmp_v6_type { ICMP6_UNREACHABLE = 1, ICMP6_PARAMETER = 4 }; /* 2: too big, 3: time exceeded */

/* Why a frame went where it went; the order is that of `ProgramCounters` in lib.rs. */
enum reason {
	STEERED_FLOW,
	STEERED_LISTENER,
	STEERED_ICMP,
	NO_SOCKET,
	PASSED_NOT_UNICAST,
	PASSED_NOT_IP,
	PASSED_VLAN,
	PASSED_FRAGMENT,
	PASSED_NOT_TCP,
	PASSED_ICMP,
	PASSED_TCP,
	PASSED_TRUNCATED,
	REASONS,
};

/* IPv4 addresses are IPv4-mapped (::ffff:a.b.c.d). Everything in network byte order. */
struct address {
	__u8 octets[16];
};

struct flow_key {
	struct address local;
	struct address remote;
	__be16 local_port;
	__be16 remote_port;
};

/* The wildcard address is all zero. */
struct listener_key {
	struct address local;
	__be16 local_port;
	__u16 zero;
};

struct vlan_tag {
	__be16 tci;
	__be16 next_proto;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, __u8);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct listener_key);
	__type(value, __u8);
} listeners SEC(".maps");

/* The interface's own addresses: a wildcard listener takes SYNs to these, and none that this host
 * merely forwards. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address);
	__type(value, __u8);
} addresses SEC(".maps");

/* By receive queue. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASONS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* The tags that our frames carry, outermost first, as ids in host order. */
const volatile __u16 vlan_count = 0;
const volatile __u16 vlan_ids[MAX_VLANS] = {};

static __always_inline void count(__u32 reason)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &reason);

	if (counter)
		(*counter)++;
}

static __always_inline int pass(__u32 reason)
{
	count(reason);
	return XDP_PASS;
}

static __always_inline int steer(struct xdp_md *ctx, __u32 reason)
{
	/* Returns its flags when the queue has no socket. */
	int action = bpf_redirect_map(&sockets, ctx->rx_queue_index, XDP_PASS);

	count(action == XDP_REDIRECT ? reason : NO_SOCKET);
	return action;
}

static __always_inline void map_v4(struct address *to, __be32 from)
{
	__builtin_memset(to->octets, 0, 10);
	to->octets[10] = 0xff;
	to->octets[11] = 0xff;
	__builtin_memcpy(to->octets + 12, &from, 4);
}

static __always_inline void copy_v6(struct address *to, const struct in6_addr *from)
{
	__builtin_memcpy(to->octets, from, 16);
}

static __always_inline bool listening(const struct address *local, __be16 port)
{
	struct listener_key key = { .local = *local, .local_port = port };

	if (bpf_map_lookup_elem(&listeners, &key))
		return true;
	__builtin_memset(&key.local, 0, sizeof(key.local));
	return bpf_map_lookup_elem(&listeners, &key) && bpf_map_lookup_elem(&addresses, local);
}

/* `key` holds the addresses. */
static __always_inline int tcp_segment(struct xdp_md *ctx, struct flow_key *key, void *at, void *end)
{
	struct tcphdr *tcp = at;

	if ((void *)(tcp + 1) > end)
		return pass(PASSED_TRUNCATED);
	key->local_port = tcp->dest;
	key->remote_port = tcp->source;
	if (bpf_map_lookup_elem(&flows, key))
		return steer(ctx, STEERED_FLOW);
	if (tcp->syn && !tcp->ack && listening(&key->local, tcp->dest))
		return steer(ctx, STEERED_LISTENER);
	return pass(PASSED_TCP);
}

/* The ports of a packet that we sent and an ICMP error quotes: the source is ours. */
static __always_inline int quoted_tcp(struct xdp_md *ctx, struct flow_key *key, void *at, void *end)
{
	__be16 *ports = at;

	if (at + QUOTED_TCP_BYTES > end)
		return pass(PASSED_ICMP);
	key->local_port = ports[0];
	key->remote_port = ports[1];
	if (bpf_map_lookup_elem(&flows, key))
		return steer(ctx, STEERED_ICMP);
	return pass(PASSED_ICMP);
}

/* RFC 792: eight bytes, then the quoted IP header and the beginning of its payload. */
static __always_inline int icmp_v4(struct xdp_md *ctx, void *at, void *end)
{
	struct flow_key key = {};
	struct iphdr *quoted = at + 8;
	__u8 type;

	if ((void *)(quoted + 1) > end)
		return pass(PASSED_ICMP);
	type = *(__u8 *)at;
	if (type != ICMP_UNREACHABLE && type != ICMP_TIME_EXCEEDED && type != ICMP_PARAMETER)
		return pass(PASSED_ICMP);
	if (quoted->version != 4 || quoted->ihl < 5 || quoted->protocol != IPPROTO_TCP ||
	    quoted->frag_off & bpf_htons(IP_OFFSET_MASK))
		return pass(PASSED_ICMP);
	map_v4(&key.local, quoted->saddr);
	map_v4(&key.remote, quoted->daddr);
	return quoted_tcp(ctx, &key, (void *)quoted + quoted->ihl * 4, end);
}

/* RFC 4443 section 2.1 and 3: eight bytes, then as much of the packet as fits. */
static __always_inline int icmp_v6(struct xdp_md *ctx, void *at, void *end)
{
	struct flow_key key = {};
	struct ipv6hdr *quoted = at + 8;
	__u8 type;

	if ((void *)(quoted + 1) > end)
		return pass(PASSED_ICMP);
	type = *(__u8 *)at;
	if (type < ICMP6_UNREACHABLE || type > ICMP6_PARAMETER)
		return pass(PASSED_ICMP);
	if (quoted->version != 6 || quoted->nexthdr != IPPROTO_TCP)
		return pass(PASSED_ICMP);
	copy_v6(&key.local, &quoted->saddr);
	copy_v6(&key.remote, &quoted->daddr);
	return quoted_tcp(ctx, &key, quoted + 1, end);
}

static __always_inline int ip_v4(struct xdp_md *ctx, void *at, void *end)
{
	struct flow_key key = {};
	struct iphdr *ip = at;
	void *payload;

	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl < 5)
		return pass(PASSED_TRUNCATED);
	/* A fragment after the first has no ports; whole fragments are the kernel's to reassemble. */
	if (ip->frag_off & bpf_htons(IP_FRAGMENT_MASK))
		return pass(PASSED_FRAGMENT);
	payload = at + ip->ihl * 4;
	if (ip->protocol == IPPROTO_ICMP)
		return icmp_v4(ctx, payload, end);
	if (ip->protocol != IPPROTO_TCP)
		return pass(PASSED_NOT_TCP);
	map_v4(&key.local, ip->daddr);
	map_v4(&key.remote, ip->saddr);
	return tcp_segment(ctx, &key, payload, end);
}

/* Extension headers are not followed: no TCP of ours is sent behind one. */
static __always_inline int ip_v6(struct xdp_md *ctx, void *at, void *end)
{
	struct flow_key key = {};
	struct ipv6hdr *ip = at;

	if ((void *)(ip + 1) > end || ip->version != 6)
		return pass(PASSED_TRUNCATED);
	if (ip->nexthdr == IPPROTO_FRAGMENT)
		return pass(PASSED_FRAGMENT);
	if (ip->nexthdr == IPPROTO_ICMPV6)
		return icmp_v6(ctx, ip + 1, end);
	if (ip->nexthdr != IPPROTO_TCP)
		return pass(PASSED_NOT_TCP);
	copy_v6(&key.local, &ip->daddr);
	copy_v6(&key.remote, &ip->saddr);
	return tcp_segment(ctx, &key, ip + 1, end);
}

static __always_inline bool is_vlan(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD);
}

SEC("xdp.frags")
int xwarp_steer(struct xdp_md *ctx)
{
	void *at = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = at;
	__u32 tags = 0;
	__be16 proto;

	if ((void *)(eth + 1) > end)
		return pass(PASSED_TRUNCATED);
	if (eth->h_dest[0] & 1)
		return pass(PASSED_NOT_UNICAST);
	proto = eth->h_proto;
	at = eth + 1;

#pragma unroll
	for (int i = 0; i < MAX_VLANS; i++) {
		struct vlan_tag *tag = at;
		__u16 id;

		if (!is_vlan(proto))
			break;
		if ((void *)(tag + 1) > end)
			return pass(PASSED_TRUNCATED);
		id = bpf_ntohs(tag->tci) & VLAN_ID_MASK;
		proto = tag->next_proto;
		at = tag + 1;
		/* Id 0 only carries a priority (IEEE 802.1Q): the frame belongs to no VLAN by it. */
		if (id == 0)
			continue;
		if (tags >= vlan_count || id != vlan_ids[tags & (MAX_VLANS - 1)])
			return pass(PASSED_VLAN);
		tags++;
	}
	if (tags != vlan_count || is_vlan(proto))
		return pass(PASSED_VLAN);

	if (proto == bpf_htons(ETH_P_IP))
		return ip_v4(ctx, at, end);
	if (proto == bpf_htons(ETH_P_IPV6))
		return ip_v6(ctx, at, end);
	return pass(PASSED_NOT_IP);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
