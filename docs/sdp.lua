-- A Wireshark dissector for SDP over iWARP and its port mapper (draft-pinkerton-iwarp-sdp-01, docs/decisions/0016-sdp-over-iwarp.md).
--
--   tshark -X lua_script:docs/sdp.lua -r capture.pcapng -Y 'sdpiwarp || sdppm'
--
-- It sees the messages behind RDMAP headers. The Hello is the private data of the MPA Request, which Wireshark shows there. Of a
-- message of several DDP segments it reads the first, and counts the bytes that follow: Wireshark's own reassembly of Sends finds
-- only the first Send of a frame, and is turned off here.

local sdp = Proto("sdpiwarp", "Sockets Direct Protocol over iWARP")

local MIDS = {
  [0x00] = "Hello", [0x01] = "HelloAck", [0x02] = "DisConn", [0x03] = "AbortConn", [0x04] = "SendSm",
  [0x05] = "RdmaWrCompl", [0x06] = "RdmaRdCompl", [0x07] = "ModeChange", [0x08] = "SrcAvailCancel",
  [0x09] = "SinkAvailCancel", [0x0a] = "SinkCancelAck", [0x0b] = "ChRcvBuf", [0x0c] = "ChRcvBufAck",
  [0x0d] = "SuspComm", [0x0e] = "SuspCommAck", [0xfd] = "SinkAvail", [0xfe] = "SrcAvail", [0xff] = "Data",
}
local MODES = { [0] = "Buffered", [1] = "Combined", [2] = "Pipelined" }
local HALVES = { [0] = "the receiver's receiving half", [1] = "the receiver's sending half" }
-- Bytes of the extended header, and whether payload may follow it.
local HEADERS = {
  [0x00] = { 16, false }, [0x01] = { 12, false }, [0x02] = { 0, false }, [0x03] = { 0, false },
  [0x04] = { 0, false }, [0x05] = { 4, false }, [0x06] = { 4, false }, [0x07] = { 4, false },
  [0x08] = { 0, false }, [0x09] = { 0, false }, [0x0a] = { 0, false }, [0x0b] = { 4, false },
  [0x0c] = { 4, false }, [0x0d] = { 8, false }, [0x0e] = { 0, false }, [0xfd] = { 20, true },
  [0xfe] = { 16, true }, [0xff] = { 0, true },
}
local BASE_BYTES = 16

local f = {
  mid = ProtoField.uint8("sdpiwarp.mid", "MID", base.HEX, MIDS),
  flags = ProtoField.uint8("sdpiwarp.flags", "Flags", base.HEX),
  oob_pres = ProtoField.bool("sdpiwarp.oob_pres", "OOB_PRES", 8, nil, 0x01),
  oob_pend = ProtoField.bool("sdpiwarp.oob_pend", "OOB_PEND", 8, nil, 0x02),
  req_pipe = ProtoField.bool("sdpiwarp.req_pipe", "REQ_PIPE", 8, nil, 0x04),
  bufs = ProtoField.uint16("sdpiwarp.bufs", "Bufs"),
  len = ProtoField.uint32("sdpiwarp.len", "Len"),
  mseq = ProtoField.uint32("sdpiwarp.mseq", "MSeq"),
  mseq_ack = ProtoField.uint32("sdpiwarp.mseqack", "MSeqAck"),
  version = ProtoField.uint8("sdpiwarp.version", "Major and minor version", base.HEX),
  max_adverts = ProtoField.uint16("sdpiwarp.maxadverts", "MaxAdverts"),
  desired = ProtoField.uint32("sdpiwarp.desremrcvsz", "DesRemRcvSz"),
  size = ProtoField.uint32("sdpiwarp.rcvsz", "Size of receives"),
  ord = ProtoField.uint16("sdpiwarp.locord", "LocORD"),
  ird = ProtoField.uint16("sdpiwarp.locird", "LocIRD"),
  bytes = ProtoField.uint32("sdpiwarp.bytes", "Bytes"),
  half = ProtoField.uint8("sdpiwarp.half", "S", base.DEC, HALVES, 0x80),
  mode = ProtoField.uint8("sdpiwarp.mode", "Mode", base.DEC, MODES, 0x70),
  stag = ProtoField.uint32("sdpiwarp.stag", "STag", base.HEX),
  va = ProtoField.uint64("sdpiwarp.va", "VA", base.HEX),
  non_discards = ProtoField.uint32("sdpiwarp.nondiscards", "NonDiscards"),
  constant = ProtoField.bytes("sdpiwarp.constants", "Constants"),
  port = ProtoField.uint16("sdpiwarp.port", "Port"),
  payload = ProtoField.bytes("sdpiwarp.payload", "Payload"),
  more = ProtoField.uint32("sdpiwarp.more", "Bytes in further segments"),
}
sdp.fields = f
local wrong = ProtoExpert.new("sdpiwarp.wrong", "Against the draft", expert.group.MALFORMED, expert.severity.ERROR)
sdp.experts = { wrong }

-- Parts of the extended headers: field, offset behind the base header, length.
local PARTS = {
  [0x00] = { { f.version, 0, 1 }, { f.max_adverts, 2, 2 }, { f.desired, 4, 4 }, { f.size, 8, 4 },
             { f.ord, 12, 2 }, { f.ird, 14, 2 } },
  [0x01] = { { f.version, 0, 1 }, { f.max_adverts, 2, 2 }, { f.size, 4, 4 }, { f.ord, 8, 2 }, { f.ird, 10, 2 } },
  [0x05] = { { f.bytes, 0, 4 } },
  [0x06] = { { f.bytes, 0, 4 } },
  [0x07] = { { f.half, 0, 1 }, { f.mode, 0, 1 } },
  [0x0b] = { { f.size, 0, 4 } },
  [0x0c] = { { f.size, 0, 4 } },
  [0x0d] = { { f.constant, 0, 6 }, { f.port, 6, 2 } },
  [0xfd] = { { f.bytes, 0, 4 }, { f.stag, 4, 4 }, { f.va, 8, 8 }, { f.non_discards, 16, 4 } },
  [0xfe] = { { f.bytes, 0, 4 }, { f.stag, 4, 4 }, { f.va, 8, 8 } },
}

-- Whether the bytes are a message: a known MID, no unknown flag, and a length that fits.
local function fits(buffer)
  if buffer:len() < BASE_BYTES then return false end
  local header = HEADERS[buffer(0, 1):uint()]
  if not header or buffer(1, 1):uint() > 7 then return false end
  local len = buffer(4, 4):uint()
  local least = BASE_BYTES + header[1]
  if len < least or len < buffer:len() or buffer:len() < least then return false end
  return header[2] or (len == least and buffer:len() == len)
end

function sdp.dissector(buffer, info, tree)
  local mid = buffer(0, 1):uint()
  local header, len = HEADERS[mid], buffer(4, 4):uint()
  info.cols.protocol = "SDP"
  info.cols.info:append(" " .. MIDS[mid])
  local sub = tree:add(sdp, buffer(), "Sockets Direct Protocol, " .. MIDS[mid])
  sub:add(f.mid, buffer(0, 1))
  local flags = sub:add(f.flags, buffer(1, 1))
  flags:add(f.oob_pres, buffer(1, 1))
  flags:add(f.oob_pend, buffer(1, 1))
  flags:add(f.req_pipe, buffer(1, 1))
  sub:add(f.bufs, buffer(2, 2))
  sub:add(f.len, buffer(4, 4))
  sub:add(f.mseq, buffer(8, 4))
  sub:add(f.mseq_ack, buffer(12, 4))
  for _, part in ipairs(PARTS[mid] or {}) do
    sub:add(part[1], buffer(BASE_BYTES + part[2], part[3]))
  end
  local at = BASE_BYTES + header[1]
  if buffer:len() > at then sub:add(f.payload, buffer(at)) end
  if len > buffer:len() then sub:add(f.more, len - buffer:len()):set_generated() end
  local bits = buffer(1, 1):uint()
  if bits % 2 == 1 and (mid ~= 0xff or len == at) then
    sub:add_proto_expert_info(wrong, "OOB_PRES without an out-of-band byte")
  end
  if bits >= 4 and mid ~= 0x05 and mid ~= 0x06 then
    sub:add_proto_expert_info(wrong, "REQ_PIPE in a message other than RdmaRdCompl and RdmaWrCompl")
  end
  if mid == 0x07 and buffer(16, 1):uint() % 0x80 >= 0x30 then
    sub:add_proto_expert_info(wrong, "unknown mode")
  end
  if (mid == 0xfd or mid == 0xfe) and buffer(16, 4):uint() == 0 then
    sub:add_proto_expert_info(wrong, "an advertisement of nothing")
  end
  if mid == 0xfe and len - at >= buffer(16, 4):uint() then
    sub:add_proto_expert_info(wrong, "a SrcAvail whose payload is all of its data")
  end
  return buffer:len()
end

set_preference("iwarp_ddp_rdmap.reassemble_iwarp_rdma_send", false)

-- The fields of all DDP segments of the frame so far: the last one is that of this segment.
local tagged = Field.new("iwarp_ddp.tagged_flag")
local offset = Field.new("iwarp_ddp.mo")

sdp:register_heuristic("iwarp_ddp_rdmap", function(buffer, info, tree)
  -- Messages are Sends, which are untagged. The bytes of RDMA Writes and Read Responses may look like one by chance.
  local flags, offsets = { tagged() }, { offset() }
  if #flags > 0 and flags[#flags].value then return false end
  -- Later segments are bytes of the program.
  if #offsets > 0 and offsets[#offsets].value ~= 0 then return false end
  if not fits(buffer) then return false end
  sdp.dissector(buffer, info, tree)
  return true
end)

-- The port mapper, figure 17: here bit 0 is the most significant one.
local mapper = Proto("sdppm", "SDP Port Mapper")
local KINDS = { [0] = "PMReq", [1] = "PMAccept", [2] = "PMAck", [3] = "PMDeny" }
local p = {
  version = ProtoField.uint8("sdppm.version", "Ver", base.DEC, nil, 0xc0),
  kind = ProtoField.uint8("sdppm.mt", "MT", base.DEC, KINDS, 0x30),
  ip_version = ProtoField.uint8("sdppm.ipv", "IPV", base.DEC, nil, 0x0f),
  time = ProtoField.uint8("sdppm.pmtime", "PmTime"),
  ap_port = ProtoField.uint16("sdppm.apport", "ApPort"),
  cp_port = ProtoField.uint16("sdppm.cpport", "CpPort"),
  handle = ProtoField.uint64("sdppm.assochandle", "AssocHandle", base.HEX),
  cp_four = ProtoField.ipv4("sdppm.cpip", "CpIPAddr"),
  ap_four = ProtoField.ipv4("sdppm.apip", "ApIPAddr"),
  cp_six = ProtoField.ipv6("sdppm.cpip6", "CpIPAddr"),
  ap_six = ProtoField.ipv6("sdppm.apip6", "ApIPAddr"),
}
mapper.fields = p
local odd = ProtoExpert.new("sdppm.wrong", "Against the draft", expert.group.MALFORMED, expert.severity.ERROR)
mapper.experts = { odd }

function mapper.dissector(buffer, info, tree)
  if buffer:len() < 48 then return 0 end
  local first = buffer(0, 1):uint()
  local kind = KINDS[math.floor(first / 16) % 4]
  info.cols.protocol = "SDP-PM"
  info.cols.info = kind
  local sub = tree:add(mapper, buffer(0, 48), "SDP Port Mapper, " .. kind)
  sub:add(p.version, buffer(0, 1))
  sub:add(p.kind, buffer(0, 1))
  sub:add(p.ip_version, buffer(0, 1))
  sub:add(p.time, buffer(1, 1))
  sub:add(p.ap_port, buffer(4, 2))
  sub:add(p.cp_port, buffer(6, 2))
  sub:add(p.handle, buffer(8, 8))
  if first % 16 == 4 then
    sub:add(p.cp_four, buffer(16, 4))
    sub:add(p.ap_four, buffer(32, 4))
  elseif first % 16 == 6 then
    sub:add(p.cp_six, buffer(16, 16))
    sub:add(p.ap_six, buffer(32, 16))
  else
    sub:add_proto_expert_info(odd, "unknown IP version")
  end
  if first >= 64 then sub:add_proto_expert_info(odd, "unknown version") end
  return 48
end

DissectorTable.get("udp.port"):add(3935, mapper)
