#!/bin/sh
# Makes what the machines of a cluster know each other by, in deploy/secrets or $SECRETS: Ray's token, a CA, a certificate
# and its key. What is there already stays. The CA's own key stands beside that folder, which goes to every machine.
#
#   sh deploy/secrets.sh example.org 10.0.0.1    # names and addresses of the endpoint, besides `openbook` and localhost
set -eu
folder=${SECRETS:-$(dirname "$0")/secrets}
days=${DAYS:-825}
umask 077
mkdir -p "$folder" "$folder-ca"
echo '*' >"$folder-ca/.gitignore"
ca=$(cd "$folder-ca" && pwd)/ca.key
cd "$folder"

names=DNS:openbook,DNS:localhost,IP:127.0.0.1
for name in "$@"; do
  case $name in
    *[!0-9.]*) names=$names,DNS:$name ;;
    *) names=$names,IP:$name ;;
  esac
done

if ! [ -e ray-token ]; then
  openssl rand -hex 32 >ray-token
fi
if ! [ -e ca.pem ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=openbook CA" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign -keyout "$ca" -out ca.pem 2>/dev/null
fi
if ! [ -e cert.pem ]; then
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=openbook" -keyout key.pem -out cert.csr 2>/dev/null
  printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$names" >cert.ext
  openssl x509 -req -in cert.csr -CA ca.pem -CAkey "$ca" -set_serial "0x$(openssl rand -hex 16)" -days "$days" -extfile cert.ext -out cert.pem 2>/dev/null
  rm cert.csr cert.ext
fi
ls -l "$PWD"
