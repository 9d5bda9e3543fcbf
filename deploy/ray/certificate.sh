#!/bin/sh
# A key and certificate for one node, signed by an authority that is made the first time:
#   certificate.sh FOLDER ADDRESS...        FOLDER/ca.crt, FOLDER/ADDRESS/tls.{crt,key}
# Give every address and name by which Ray's nodes call this one. Keep FOLDER/ca.key off the cluster.
set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 FOLDER ADDRESS..." >&2
    exit 2
fi
folder=$1
shift
names="IP:127.0.0.1,DNS:localhost"
for address in "$@"; do
    case $address in
        *[!0-9.]*) names="$names,DNS:$address" ;;
        *) names="$names,IP:$address" ;;
    esac
done

umask 077
mkdir -p "$folder/$1"
if [ ! -e "$folder/ca.key" ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=dps cluster" \
        -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
fi
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
    -keyout "$folder/$1/tls.key" -out "$folder/$1/tls.csr" 2>/dev/null
printf 'subjectAltName=%s\n' "$names" > "$folder/$1/tls.ext"
openssl x509 -req -in "$folder/$1/tls.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -days 825 \
    -extfile "$folder/$1/tls.ext" -out "$folder/$1/tls.crt" 2>/dev/null
rm "$folder/$1/tls.csr" "$folder/$1/tls.ext"
echo "$folder/$1/tls.crt for $names"
