"""For `ray up` on machines that stand: what ends and removes, after `ray down`, all that it brought and made."""

from openbook.deployment.files import Lines
from openbook.deployment.topology import HAPROXY

BIN = "~/openbook/bin"
RUNS = "pgrep -u $(id -u) -x raylet >/dev/null"
"""Whether a Ray of this user does."""
ENDED = "while pgrep -u $(id -u) -x gcs_server; do sleep 1; done"
"""Waits for the last process that `ray stop` stops."""

LOGS = "find /tmp/ray/session_[0-9]*/logs -maxdepth 0 -user $(id -u) | sort | tail -n 1"
"""Finds those of this user's last Ray. Old links in /tmp, such as `session_latest`, systemd removes."""


def clean_up(wait: str, name: str) -> Lines:
    """What outlives `ray down`, which tells the head alone and removes nothing: a process, one for each machine, that
    waits until no Ray of this user runs. Without it workers end after a minute, but for Ray's log monitor and HAProxy.

    It has the lock of those who start Ray while it removes what is theirs: first what `ray up` brings, for another one
    may follow. In /tmp/ray it leaves what is of others, and for a while what an operator needs who works on the head.

    Args:
        wait: shell commands, before which nothing is removed.
        name: of the cluster.
    """
    return Lines(f"""\
setsid nohup sh -c "exec 8>~/openbook/cleaner; flock -n 8 || exit
  while :; do
    while {RUNS}; do sleep 2; done; {wait}
    exec 9>~/openbook/starting; flock 9
    {RUNS} || break
    exec 9>&-
  done
  rm -f ~/ray_bootstrap_*
  sed -i --follow-symlinks '/^export PATH=.HOME.openbook.bin:.PATH/d' ~/.bashrc; find ~/.bashrc -empty -delete
  {BIN}/ray stop 8>&- 9>&-; pkill -u $(id -u) -f ' -db -f [^ ]*/{HAPROXY}/'
  mv \\"\\$({LOGS})\\" ~/openbook/logs.new && rm -rf ~/openbook/logs &&
    mv ~/openbook/logs.new ~/openbook/logs &&
    find /tmp/ray -maxdepth 1 -name 'session_*' -newer ~/openbook/began -exec rm -r {{}} +
  rm -rf ~/{HAPROXY}/* ~/openbook/began; exec 9>&- 8>&-
  for each in 1 2 3 4 5 6 7 8; do sleep 2; find /tmp/ray_ssh_* -user $(id -u) -type d -empty -delete; done
  pgrep -u $(id -u) -f 'ray (up|down) ' || rm -f /tmp/ray/cluster-{name}.*
  find /tmp/ray -maxdepth 1 '(' -name 'session_*' -o -name 'cluster-*' ')' | grep -q . || rm -r /tmp/ray
" >/dev/null 2>&1 </dev/null &
""")
