-- A Wireshark dissector for RDMA/TCP of 2000 (docs/decisions/0014-two-framings.md).
--
--   tshark -X lua_script:docs/rdma-tcp.lua -r capture.pcapng -Y rdmatcp
--
-- It finds a segment where a TCP payload begins with version 1, no reserved bit, and a length that fits its type; on a
-- known port use "Decode as" instead.

local proto = Proto("rdmatcp", "RDMA/TCP of 2000")

local TYPES = { [0] = "Send", [1] = "RDMA Write", [2] = "RDMA Read Request", [3] = "RDMA Read Response" }
local CONTROLS = {
  [1] = "Connect", [2] = "Accept", [3] = "Reject", [4] = "Terminate", [5] = "Invalidate", [6] = "Immediate Data",
}
local ATOMICS = { [0] = "Fetch and Add", [2] = "Compare and Swap" }

local f = {
  version = ProtoField.uint8("rdmatcp.version", "Version"),
  reserved = ProtoField.uint8("rdmatcp.reserved", "Reserved", base.HEX, nil, 0xe0),
  solicited = ProtoField.bool("rdmatcp.solicited", "Solicited event", 8, nil, 0x10),
  first = ProtoField.bool("rdmatcp.begin", "B: first segment of the message", 8, nil, 0x08),
  last = ProtoField.bool("rdmatcp.end", "E: last segment of the message", 8, nil, 0x04),
  type = ProtoField.uint8("rdmatcp.type", "Type", base.DEC, TYPES, 0x03),
  length = ProtoField.uint16("rdmatcp.length", "Segment Length"),
  id = ProtoField.uint64("rdmatcp.id", "Connection ID", base.HEX),
  number = ProtoField.uint32("rdmatcp.number", "Message Number"),
  order = ProtoField.uint16("rdmatcp.order", "Order"),
  clen = ProtoField.uint8("rdmatcp.clen", "Words of control data"),
  offset = ProtoField.uint32("rdmatcp.offset", "Data Offset"),
  buffer = ProtoField.uint32("rdmatcp.buffer", "RDMA Buffer ID", base.HEX),
  buffer_offset = ProtoField.uint32("rdmatcp.buffer_offset", "RDMA Buffer Offset", base.HEX),
  total = ProtoField.uint32("rdmatcp.total", "RDMA Length"),
  high = ProtoField.uint32("rdmatcp.high", "High half of the offset", base.HEX),
  control = ProtoField.uint8("rdmatcp.control", "Control", base.DEC, CONTROLS),
  ird = ProtoField.uint16("rdmatcp.ird", "IRD"),
  ord = ProtoField.uint16("rdmatcp.ord", "ORD"),
  code = ProtoField.uint16("rdmatcp.terminate", "Layer, type and code", base.HEX),
  stag = ProtoField.uint32("rdmatcp.stag", "STag to invalidate", base.HEX),
  immediate = ProtoField.bytes("rdmatcp.immediate", "Immediate Data"),
  atomic = ProtoField.uint32("rdmatcp.atomic", "Atomic operation", base.DEC, ATOMICS),
  operand = ProtoField.uint64("rdmatcp.operand", "Operand", base.HEX),
  payload = ProtoField.bytes("rdmatcp.payload", "Payload"),
  pad = ProtoField.bytes("rdmatcp.pad", "Pad"),
  crc = ProtoField.uint32("rdmatcp.crc", "CRC-32", base.HEX),
  crc_good = ProtoField.bool("rdmatcp.crc_good", "CRC is correct"),
}
proto.fields = f
local bad_crc = ProtoExpert.new("rdmatcp.bad_crc", "The CRC is wrong", expert.group.CHECKSUM, expert.severity.ERROR)
proto.experts = { bad_crc }

-- Lua before 5.3 has bit32; Wireshark's own library, with signed results, is there in each version.
local bits = bit32 or bit

-- The reflected CRC-32 with the generator 0xDB710641, one byte per step.
local TABLE = {}
for byte = 0, 255 do
  local register = byte
  for _ = 1, 8 do
    local odd = bits.band(register, 1)
    register = bits.rshift(register, 1)
    if odd == 1 then register = bits.bxor(register, 0x82608edb) end
  end
  TABLE[byte] = register
end

local function crc32(bytes)
  local register = 0xffffffff
  local bxor, band, rshift, byte = bits.bxor, bits.band, bits.rshift, string.byte
  for at = 1, #bytes do
    register = bxor(rshift(register, 8), TABLE[band(bxor(register, byte(bytes, at)), 0xff)])
  end
  return bxor(register, 0xffffffff)
end

local HEAD = 20
local PREFIX = 12

-- Bytes of the segment that begins at `at`, with pad and CRC; nil when no segment can begin there.
local function size(tvb, at)
  local flags, length = tvb(at + 1, 1):uint(), tvb(at + 2, 2):uint()
  local tagged = flags % 4 == 1 or flags % 4 == 2
  if tvb(at, 1):uint() ~= 1 or flags >= 0x20 or length < (tagged and 32 or 24) then return nil end
  return math.floor((length + 3) / 4) * 4 + 4
end

local function control_of_send(tvb, at, words, tree)
  tree:add(f.control, tvb(at, 1))
  local code, operand = tvb(at, 1):uint(), at + 4
  if (code == 1 or code == 2) and words == 2 then
    tree:add(f.ird, tvb(operand, 2))
    tree:add(f.ord, tvb(operand + 2, 2))
  elseif code == 4 and words == 2 then
    tree:add(f.code, tvb(operand, 2))
  elseif code == 5 and words == 2 then
    tree:add(f.stag, tvb(operand, 4))
  elseif code == 6 and words == 3 then
    tree:add(f.immediate, tvb(operand, 8))
  end
  return CONTROLS[code]
end

local function segment(tvb, at, whole, pinfo, root)
  local tree = root:add(proto, tvb(at, whole))
  local flags = tvb(at + 1, 1)
  local kind, length, words = flags:uint() % 4, tvb(at + 2, 2):uint(), tvb(at + 19, 1):uint()
  tree:add(f.version, tvb(at, 1))
  for _, field in ipairs({ f.reserved, f.solicited, f.first, f.last, f.type }) do tree:add(field, flags) end
  tree:add(f.length, tvb(at + 2, 2))
  tree:add(f.id, tvb(at + 4, 8))
  tree:add(f.number, tvb(at + 12, 4))
  tree:add(f.order, tvb(at + 16, 2))
  tree:add(f.clen, tvb(at + 19, 1))
  local head = (kind == 1 or kind == 2) and 32 or 24
  local name = TYPES[kind]
  if head + 4 * words > length then return end
  if head == 24 then
    tree:add(f.offset, tvb(at + HEAD, 4))
    if kind == 0 and words > 0 then
      name = control_of_send(tvb, at + head, words, tree) or name
    end
  else
    tree:add(f.buffer, tvb(at + 20, 4))
    tree:add(f.buffer_offset, tvb(at + 24, 4))
    tree:add(f.total, tvb(at + 28, 4))
    if words > 0 then tree:add(f.high, tvb(at + 32, 4)) end
    if kind == 2 and words == 10 then
      tree:add(f.atomic, tvb(at + 36, 4))
      for operand = 0, 3 do tree:add(f.operand, tvb(at + 40 + 8 * operand, 8)) end
      name = "Atomic Request"
    end
  end
  local payload = head + 4 * words
  if length > payload then tree:add(f.payload, tvb(at + payload, length - payload)) end
  if whole - 4 > length then tree:add(f.pad, tvb(at + length, whole - 4 - length)) end
  local field = tvb(at + whole - 4, 4)
  tree:add_le(f.crc, field)
  local good = (crc32(tvb:raw(at, whole - 4)) - field:le_uint()) % 0x100000000 == 0
  tree:add(f.crc_good, field, good):set_generated()
  if not good then tree:add_proto_expert_info(bad_crc) end
  pinfo.cols.info:append(string.format(" %s #%u (%u)", name, tvb(at + 12, 4):uint(), length - payload))
end

function proto.dissector(tvb, pinfo, root)
  local at = 0
  while at < tvb:len() do
    if tvb:len() - at < PREFIX then
      pinfo.desegment_offset, pinfo.desegment_len = at, DESEGMENT_ONE_MORE_SEGMENT
      return tvb:len()
    end
    local whole = size(tvb, at)
    if not whole then return at end
    if tvb:len() - at < whole then
      pinfo.desegment_offset, pinfo.desegment_len = at, whole - (tvb:len() - at)
      return tvb:len()
    end
    if at == 0 then
      pinfo.cols.protocol = "RDMA/TCP"
      pinfo.cols.info = ""
    end
    segment(tvb, at, whole, pinfo, root)
    at = at + whole
  end
  return at
end

local function heuristic(tvb, pinfo, root)
  if tvb:len() < PREFIX or not size(tvb, 0) then return false end
  pinfo.conversation = proto
  proto.dissector(tvb, pinfo, root)
  return true
end

proto:register_heuristic("tcp", heuristic)
DissectorTable.get("tcp.port"):add_for_decode_as(proto)
