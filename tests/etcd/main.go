// The newest etcd, from its module, for systems that package an older one. `tests/run.sh --newest-etcd` builds it.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
