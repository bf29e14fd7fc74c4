#!/usr/bin/env bash
# Builds the guest image of the RDMA bed: image.sh FOLDER. Does nothing if the folder has it.
#
# Debian's plain kernel (its cloud flavour has neither rdma_rxe nor 9p), an initramfs with the modules that the bed needs,
# and the independent peer's pyverbs with its libraries. Packages come from the machine's own Debian mirror; they are
# unpacked here and never installed. Fails with a reason on its last line.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(realpath -m "$1")
stamp=$folder/ok-$(cat "$here"/{image.sh,init.sh} | sha256sum | cut -c1-16)
die() { echo "no RDMA bed: $*" >&2; exit 1; }
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
[[ ! -e $stamp ]] || exit 0
[[ $(uname -m) == x86_64 ]] || die "it needs an x86-64 machine"
for program in apt-get apt-cache dpkg-deb python3 qemu-system-x86_64; do
  command -v "$program" >/dev/null || die "no $program here (Debian: apt install qemu-system-x86)"
done

# crc32_generic is rxe's checksum: the guest has nothing that would load it by itself.
modules=(virtio_pci virtio_console virtio_net virtio_rng 9pnet_virtio 9p overlay crc32_generic rdma_rxe ib_uverbs sch_netem)
meta=${RDMA_BED_KERNEL:-linux-image-amd64}
work=$folder/work
rm -rf "$folder"/ok-* "$work" "$folder/pyverbs"
mkdir -p "$work"/{debs,kernel,tools} "$work/root"/{bin,proc,sys,dev,ro,rw,new}

kernel_package() { apt-cache depends "$meta" 2>/dev/null | awk '/linux-image-[0-9]/ && !found++ { print $2 } END { exit !found }'; }
packages=(busybox-static python3-pyverbs librdmacm1 libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200)
download() {
  local kernel
  kernel=$(kernel_package) || return 1
  (cd "$work/debs" && apt-get -qq -o APT::Sandbox::User=root download "$kernel" "${packages[@]}") >&2
}
download || { apt-get -qq update >&2 && download; } ||
  die "the Debian mirror of this machine gave no $meta or one of ${packages[*]} (apt-get download, see above)"

unpack() { dpkg-deb --fsys-tarfile "$work/debs/$1"_*.deb | tar -x -C "$2" "${@:3}"; }
dpkg-deb --fsys-tarfile "$work"/debs/linux-image-*.deb | tar -x -C "$work/kernel" --wildcards './boot/vmlinuz-*' \
  './lib/modules/*/modules.*' './lib/modules/*/kernel/'{fs,net,crypto,lib,arch,virt}'/*' \
  './lib/modules/*/kernel/drivers/'{infiniband,virtio,block,char,net/virtio_net.ko\*,net/net_failover.ko\*}'*'
unpack busybox-static "$work/tools"
for package in "${packages[@]:1}"; do unpack "$package" "$work/tools"; done
busybox=$work/tools/bin/busybox
[[ -x $busybox ]] || busybox=$work/tools/usr/bin/busybox

# Each module with all that it depends on; modules.dep lists the whole closure. depmod reads plain files only.
find "$work/kernel" -name '*.ko.xz' -exec xz -d {} +
version=$(ls "$work/kernel/lib/modules")
from=$work/kernel/lib/modules/$version to=$work/root/lib/modules/$version
"$busybox" depmod -b "$work/kernel" "$version"
mkdir -p "$to"
for module in "${modules[@]}"; do
  if grep -E "/${module//_/[-_]}\.ko:" "$from/modules.dep" >>"$work/closure"; then
    echo "$module" >>"$work/root/modules"
  else
    grep -qE "/${module//_/[-_]}\.ko" "$from/modules.builtin" || die "$meta has no module $module"
  fi
done
tr -d : <"$work/closure" | tr ' ' '\n' | sed '/^$/d' | sort -u | tar -C "$from" -c -T - | tar -C "$to" -x
"$busybox" depmod -b "$work/root" "$version"

# The ELF kernel out of its bzImage: QEMU starts it by PVH, and no guest has to unpack it under emulation.
python3 - "$work/kernel/boot/vmlinuz-$version" "$folder/vmlinux" <<'PY'
import lzma, struct, subprocess, sys

data = open(sys.argv[1], "rb").read()
start, size = struct.unpack_from("<II", data, 0x248)
start += (data[0x1F1] + 1) * 512
packed = data[start : start + size - 4]  # its last four bytes are the length
try:
    if packed[:4] == b"\x28\xb5\x2f\xfd":
        data = subprocess.run(["zstd", "-dc"], input=packed, stdout=-1, check=True).stdout
    else:
        data = lzma.LZMADecompressor().decompress(packed)
except (OSError, lzma.LZMAError):
    pass  # the bzImage starts too, later
open(sys.argv[2], "wb").write(data)
PY
cp "$busybox" "$work/root/bin/busybox"
install -m 755 "$here/init.sh" "$work/root/init"
(cd "$work/root" && find . | "$work/root/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$folder/initrd"
mv "$work/tools" "$folder/pyverbs"
rm -rf "$work"
touch "$stamp"
