#!/usr/bin/env bash
# Puts a dockerd that knows CDI (Docker 25 or later) into a folder: docker_with_cdi.sh FOLDER. Does nothing if the folder
# has one, or the machine's own knows it.
#
# It is Debian trixie's, from the machine's own Debian mirror; it runs beside the containerd and runc of bookworm. Its package
# is unpacked here and never installed. Fails with a reason on its last line.
set -euo pipefail
folder=$(realpath -m "$1")
suite=trixie
die() { echo "no Docker that knows CDI: $*" >&2; exit 1; }
knows_cdi() { [[ $("$1" --version 2>/dev/null) =~ version\ ([0-9]+) ]] && ((BASH_REMATCH[1] >= 25)); }
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
if knows_cdi dockerd || knows_cdi "$folder/dockerd"; then exit 0; fi
for program in apt-get dpkg-deb; do
  command -v "$program" >/dev/null || die "no $program here, which would get it: install Docker 25 or later"
done

# Lists and cache of its own: the machine's apt never hears of another release. Proxies are those of its configuration.
work=$folder/work
rm -rf "$work"
mkdir -p "$work"/{lists/partial,cache/archives/partial,state}
touch "$work/state/status"
mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' | awk '$1 == "Debian" { print $2; exit }')
[[ -n $mirror ]] || die "apt knows no Debian mirror here: install Docker 25 or later"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$work/sources"
apt() {
  apt-get -qq -o Dir::Etc::SourceList="$work/sources" -o Dir::Etc::SourceParts=/dev/null -o Dir::State="$work/state" \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@" >&2
}
apt update && (cd "$work" && apt download docker.io) || die "$mirror gave no docker.io of $suite (see above)"
dpkg-deb --fsys-tarfile "$work"/docker.io_*.deb | tar -x -C "$work" ./usr/sbin/dockerd
mv "$work/usr/sbin/dockerd" "$folder/dockerd"
rm -rf "$work"
knows_cdi "$folder/dockerd" || die "docker.io of $suite does not run here: $("$folder/dockerd" --version 2>&1 | tail -n 1)"
