#!/bin/sh
# Makes what the machines of a cluster know each other by, in deploy/secrets or $SECRETS: Ray's token, a CA, a certificate
# and its key. What is there already stays. The CA's own key stands beside that folder, which goes to every machine.
#
#   sh deploy/secrets.sh example.org 10.0.0.1    # names and addresses of the endpoint, besides `openbook` and localhost
set -eu
folder=${SECRETS:-$(dirname "$0")/secrets}
days=${DAYS:-825}

refuse() { echo "'$1' is neither a name nor an address" >&2; exit 1; }
quietly() { said=$("$@" 2>&1) || { echo "$said" >&2; exit 1; }; }
request() { quietly openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "$@"; }

names=DNS:openbook,DNS:localhost,IP:127.0.0.1
for name in "$@"; do
  case $name in
    '' | *[!0-9A-Za-z.:*_-]* | *:*[!0-9A-Fa-f:.]* | *[!0-9A-Fa-f:.]*:*) refuse "$name" ;;
    *:*:*) names=$names,IP:$name ;;
    *:*) refuse "$name" ;; # a port is no part of it, and of IPv6 there are two colons at least
    *[!0-9.]*) names=$names,DNS:$name ;;
    *) names=$names,IP:$name ;;
  esac
done
# Before anything is made openssl says whether those are addresses: IPv6 has many forms.
request -subj /CN=openbook -addext "subjectAltName=$names" -keyout /dev/null -out /dev/null

mkdir -p -m 755 "$folder" # its files may be given to another user, as that of the containers, who has to come in
folder=$(cd "$folder" && pwd) # whole, for `secrets/-ca` would lie within
umask 077
mkdir -p "$folder-ca"
echo '*' >"$folder-ca/.gitignore"
ca=$folder-ca/ca.key
cd "$folder"
trap 'rm -f token.new ca.new key.new cert.new cert.csr cert.ext' EXIT

if ! [ -e ray-token ]; then
  openssl rand -hex 32 >token.new
  mv token.new ray-token
fi
if ! [ -e ca.pem ]; then
  request -x509 -days 3650 -subj "/CN=openbook CA" -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign \
    -keyout "$ca" -out ca.new
  mv ca.new ca.pem
fi
if ! [ -e cert.pem ]; then
  if ! [ -r "$ca" ]; then
    echo "$ca: the CA's key is not there: only who has it makes another certificate" >&2
    exit 1
  fi
  request -subj /CN=openbook -keyout key.new -out cert.csr
  printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$names" >cert.ext
  quietly openssl x509 -req -in cert.csr -CA ca.pem -CAkey "$ca" -set_serial "0x$(openssl rand -hex 16)" -days "$days" -extfile cert.ext -out cert.new
  mv key.new key.pem
  mv cert.new cert.pem
  rm cert.csr cert.ext
fi
ls -l "$PWD"
