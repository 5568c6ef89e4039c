//! Locks in etcd, beside the lock service of etcd itself over as many connections: one for each
//! client. The data are in memory.

use std::{io, time::Duration};

use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::EtcdCluster;
use prost::Message;
use tonic::{
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use crate::{
    contest::{Contest, Round},
    held,
    report::Row,
    subject::{LEASE, Ours, Subject, connect},
    turns::{contend, together},
};

const TASKS: [usize; 2] = [1, 64];
const CLIENTS: [usize; 2] = [2, 32];
const LEASES: usize = 10_000;
const PEER: &str = "etcd's own";

/// # Errors
/// When etcd is not installed.
pub(crate) async fn measure(slice: Duration) -> io::Result<Vec<Row>> {
    let server = EtcdCluster::builder().try_start().await;
    let server = server.map_err(io::Error::other)?;
    let mut rows = Vec::new();
    for tasks in TASKS {
        rows.extend(uncontended(&server, slice, tasks).await);
    }
    for clients in CLIENTS {
        rows.extend(handoff(&server, slice, clients).await);
    }
    let locks = connect(&server.url(), 1).await.remove(0);
    rows.extend(held::watch("etcd held", &locks, LEASES, ("etcd", &server)).await);
    locks.shutdown().await;
    Ok(rows)
}

/// Acquire and release, every task its own key, over one connection.
async fn uncontended(server: &EtcdCluster, slice: Duration, tasks: usize) -> Vec<Row> {
    let locks = connect(&server.url(), 1).await.remove(0);
    let peer = Session::connect(server).await;
    let contest = Contest::new("etcd uncontended", tasks, slice).servers([server]);
    let contest = contest.each("lock-runtime", |task| {
        Ours::new(&locks, format!("bench:{task}"))
    });
    let contest = contest.each(PEER, |task| peer.lock(format!("peer:{task}")));
    let rows = contest.run().await;
    locks.shutdown().await;
    rows
}

/// Clients that hand one key to each other.
async fn handoff(server: &EtcdCluster, slice: Duration, clients: usize) -> Vec<Row> {
    let ours = connect(&server.url(), clients).await;
    let peers = join_all((0..clients).map(|_| Session::connect(server))).await;
    let contest = Contest::new("etcd handoff", clients, slice)
        .servers([server])
        .subject("lock-runtime", |round, slice| hand_off(&ours, round, slice))
        .subject(PEER, |round, slice| {
            let subject = move |peer: &Session| peer.lock(format!("peer:{round}"));
            together(slice, peers.iter().map(subject), contend)
        });
    let rows = contest.run().await;
    join_all(ours.iter().map(LockClient::shutdown)).await;
    rows
}

fn hand_off(clients: &[LockClient], round: usize, slice: Duration) -> impl Future<Output = Round> {
    let subject = move |locks| Ours::new(locks, format!("bench:{round}"));
    together(slice, clients.iter().map(subject), contend)
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LockRequest {
    #[prost(bytes, tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LockResponse {
    #[prost(bytes, tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UnlockRequest {
    #[prost(bytes, tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UnlockResponse {}

/// A client of etcd's lock service, with a lease for its locks.
#[derive(Clone)]
struct Session {
    channel: Channel,
    lease: i64,
}

impl Session {
    async fn connect(server: &EtcdCluster) -> Self {
        let url = format!("http://{}", server.hosts());
        let endpoint = Endpoint::from_shared(url)
            .expect("an address")
            .tcp_nodelay(true);
        let channel = endpoint.connect().await.expect("our own server answers");
        let mut session = Self { channel, lease: 0 };
        let ttl = LEASE.as_secs() as i64 * 100;
        let granted = session.call("/etcdserverpb.Lease/LeaseGrant", LeaseGrantRequest { ttl });
        let LeaseGrantResponse { id } = granted.await;
        session.lease = id;
        session
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> A
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.expect("our own server answers");
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::<Q, A>::default();
        let reply = grpc.unary(tonic::Request::new(request), path, codec).await;
        reply.expect("our own server answers").into_inner()
    }

    fn lock(&self, name: String) -> EtcdLock {
        EtcdLock {
            session: self.clone(),
            name: name.into_bytes(),
        }
    }
}

struct EtcdLock {
    session: Session,
    name: Vec<u8>,
}

impl Subject for EtcdLock {
    type Guard = Vec<u8>;

    async fn acquire(&self) -> Vec<u8> {
        let request = LockRequest {
            name: self.name.clone(),
            lease: self.session.lease,
        };
        let LockResponse { key } = self.session.call("/v3lockpb.Lock/Lock", request).await;
        key
    }

    async fn release(&self, key: Vec<u8>) {
        let UnlockResponse {} = self
            .session
            .call("/v3lockpb.Lock/Unlock", UnlockRequest { key })
            .await;
    }
}
