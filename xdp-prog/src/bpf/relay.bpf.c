// SPDX-License-Identifier: (MIT OR GPL-2.0-only)
//
// The entry to the switch when a foreign XDP program has the interface: a tc program, which runs behind XDP and sees
// the frames that the other program passes. It sends frames to ports that a client owns out of the relay, a pair whose
// far end runs xwarp_uplink; others go to the kernel. It shares the maps of the switch.
//
// The kernel has taken VLAN tags out of the frames that arrive here, so the frames of a VLAN are none of ours.

#define FRAMES_ARE_SKBS
#include "owners.h"

/* Index of the relay's near end, in the network namespace of the interface. */
const volatile __u32 relay = 0;

SEC("tc")
int xwarp_relay(struct __sk_buff *ctx)
{
	struct packet packet = {};
	__u32 *slot;
	int reason;

	if (ctx->vlan_present)
		return pass(PASSED_VLAN);
	reason = parse(ctx, &packet);
	if (reason != PARSED)
		return dismiss(reason);
	slot = packet.later ? fragment_owner(&packet) : receiver(&packet);
	if (!slot)
		return pass(packet.quoted ? PASSED_ICMP : packet.fragment ? PASSED_FRAGMENT : PASSED_TCP);
	if (!is_for_station(ctx))
		return pass(PASSED_OTHER_STATION);
	if (packet.fragment && !packet.later)
		note_fragment(&packet, *slot);
	/* xwarp_uplink checks the source. */
	return bpf_redirect(relay, 0);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
