"""Replicas that say nothing, or that they are about to stop: what HAProxy is to make of both."""

SILENT_S = 1
"""How long a replica may take to say that it is well, and how often it is asked, where there is another one. After two
silences in a row, so 2.3 to 3.3 s after it froze, it is down.
"""

CONNECT_S = 2
"""How long it may take to accept a connection, where there is another one: a lost packet is sent again after 1 s."""

SILENT = "silent.lua"
SILENT_LUA = (
    f"local CONNECT_S = {CONNECT_S}\n"
    + """\
-- What a server holds that is down because it is silent is taken from it, so that `retry-on` asks another: at once if
-- another one is up. If all are silent, or end what connects, the machine may be at a loss, or they take no new
-- connections, as checks are, and answer over those that they have: so they have 10 s, as if they were up. Not by
-- `on-marked-down shutdown-sessions`: that would cut off what servers end that are about to stop, and who has just
-- found out that one is gone. Who still waits for a connection moves on by himself, after CONNECT_S.
-- What is well but about to stop is asked on where nobody else is up: who follows it may not be known here yet.
local since = {}

local function relieve(backend)
  local now, lost, leaving, n, up = core.now(), {}, {}, 0, false
  now = now.sec + now.usec / 1000000
  for name, server in pairs(backend.servers) do
    local stats, key = server:get_stats(), backend:get_name() .. "/" .. name
    if stats.bck == 0 then
      local status = stats.check_status or ""  -- none while it is not checked
      local check = status:match("L%dTOUT") or status:match("SOCKERR")
      since[key] = check and (since[key] or now) or nil
      local silent, down = since[key] and now - since[key], stats.status:match("^DOWN")
      local is_lost = silent and (down or silent > 0.8)  -- its second silence is as good as over
      if status:match("L7STS") or status:match("L7RSP") then
        leaving[server] = stats.status
      elseif is_lost then
        local held, grace = stats.scur > 0 and check ~= "SOCKERR", check == "L4TOUT" and CONNECT_S + 1 or 0
        lost[server] = {stats.status, down and held, stats.lastchg >= grace, silent - grace}
      end
      n, up = n + 1, up or stats.status:match("^UP") and not is_lost and not leaving[server]
    end
  end
  for server, found in pairs(lost) do
    local status, holds, is_due, silent = table.unpack(found)
    if holds and (is_due and (up or n == 1) or silent > 10) then
      server:shut_sess()
    elseif n > 1 and not up and silent > 10 then
      server:check_force_down()
    elseif n > 1 and not up and status ~= "UP" then
      server:check_force_up()
    end
  end
  for server, status in pairs(leaving) do
    if not up and status ~= "UP" then server:check_force_up() end
  end
end

core.register_task(function()
  while core.get_info().Stopping == 0 do  -- a former process checks nobody any more, and ends what it holds
    core.msleep(100)
    for _, backend in pairs(core.backends) do relieve(backend) end
  end
end)
"""
)
