"""For machines without containers or Ray: systemd units. `openbook-index@0` is shard 0, `openbook` the endpoint."""

from openbook.deployment.files import MADE
from openbook.deployment.topology import LOADS_WITHIN_S, Topology
from openbook.serving.launch.environment import longest_s

FOLDER = "deploy/systemd"
CREDENTIALS = "%t/credentials/%n"
"""What `%d` is since systemd 251. A former one leaves out the line that says it, and nothing would be encrypted."""
GUARDED = """\
DynamicUser=yes
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices={private_devices}
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
LoadCredential=cert.pem:/etc/openbook/tls/cert.pem
LoadCredential=key.pem:/etc/openbook/tls/key.pem
LoadCredential=ca.pem:/etc/openbook/tls/ca.pem
LimitNOFILE=65536
Restart=always
RestartSec=1"""


def units(topology: Topology) -> dict[str, str]:
    """Texts by path."""
    ports, index = topology.ports, topology.index
    return {
        f"{FOLDER}/openbook-index@.service": f"""\
{MADE}
# `systemctl enable --now openbook-index@0 openbook-index@1`: a server each, of the snapshot in /srv/openbook/snapshot.
[Unit]
Description=openbook index server of shard %i
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
# Shard s listens on port {ports.index} + s.
ExecStart=/bin/sh -c 'exec /opt/openbook/bin/openbook index serve /srv/openbook/snapshot --shard %i --host 0.0.0.0 \
--port $$(({ports.index} + %i)) --threads {index.threads} --metrics-port {ports.metrics}'
Environment="OPENBOOK_INDEX_SERVER__TLS={{certificate: {CREDENTIALS}/cert.pem, key: {CREDENTIALS}/key.pem}}"
Environment=OMP_WAIT_POLICY=PASSIVE
TimeoutStopSec=60
MemoryHigh={index.memory_bytes}
# For index_server.keep_in_memory.
LimitMEMLOCK=infinity
# Should the endpoint be on this machine too: who hardly works is not to wait behind its models.
CPUWeight=1600
{_guarded(topology, private_devices="yes")}

[Install]
WantedBy=multi-user.target
""",
        f"{FOLDER}/openbook.service": f"""\
{MADE}
# The endpoint: settings in /etc/openbook/openbook.yaml, addresses of index servers in /etc/openbook/servers.
[Unit]
Description=openbook endpoint
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart=/opt/openbook/bin/openbook up --config /etc/openbook/openbook.yaml
Environment="OPENBOOK_INDEX__DISCOVER=file:/etc/openbook/servers"
Environment="OPENBOOK_INDEX__TLS={{ca: {CREDENTIALS}/ca.pem}}"
Environment=OPENBOOK_INDEX__SERVER_NAME={topology.secrets.server_name}
Environment=OPENBOOK_INDEX__WAIT_S={LOADS_WITHIN_S}
Environment="OPENBOOK_SERVING__TLS={{certificate: {CREDENTIALS}/cert.pem, key: {CREDENTIALS}/key.pem}}"
Environment=OPENBOOK_SERVING__HOST=0.0.0.0
Environment=OPENBOOK_SERVING__HTTP_PORT={ports.http}
Environment=OPENBOOK_SERVING__GRPC_PORT={ports.grpc}
Environment=OPENBOOK_SERVING__METRICS_PORT={ports.metrics}
Environment=HOME=%S/openbook
StateDirectory=openbook
TimeoutStartSec=infinity
TimeoutStopSec={longest_s(topology.served.answer)}
KillMode=mixed
{_guarded(topology, private_devices="no")}

[Install]
WantedBy=multi-user.target
""",
    }


def _guarded(topology: Topology, private_devices: str) -> str:
    may_listen = "\nAmbientCapabilities=CAP_NET_BIND_SERVICE" if topology.low_port else ""
    return GUARDED.format(private_devices=private_devices) + may_listen
