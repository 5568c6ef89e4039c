//! The messages of etcd's gRPC interface that the store needs, and the paths of its calls.
//!
//! They are written out, so that no compiler of protocol buffers is needed. Fields that are not
//! read are left out: the decoder skips them.

use prost::{Message, Oneof};

pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
pub(super) const TXN: &str = "/etcdserverpb.KV/Txn";
pub(super) const WATCH: &str = "/etcdserverpb.Watch/Watch";
pub(super) const LEASE_GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
pub(super) const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
pub(super) const STATUS: &str = "/etcdserverpb.Maintenance/Status";

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    /// The first key after the range. Empty for a single key.
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(oneof = "Request", tags = "1, 2, 4")]
    request: Option<Request>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Request {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseOp {
    #[prost(oneof = "Response", tags = "1, 2, 4")]
    response: Option<Response>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Response {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(Empty),
    #[prost(message, tag = "4")]
    Txn(TxnResponse),
}

/// A reply without content that matters.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    #[prost(int32, tag = "1")]
    result: i32,
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    #[prost(oneof = "Target", tags = "4, 7")]
    of: Option<Target>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Target {
    #[prost(int64, tag = "4")]
    Version(i64),
    #[prost(bytes, tag = "7")]
    Value(Vec<u8>),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) create: Option<WatchCreate>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    /// 1: no deletions.
    #[prost(int32, repeated, tag = "5")]
    pub(super) filters: Vec<i32>,
    #[prost(int64, tag = "7")]
    pub(super) watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchResponse {
    #[prost(int64, tag = "2")]
    pub(super) watch_id: i64,
    #[prost(bool, tag = "3")]
    pub(super) created: bool,
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<Event>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantRequest {
    /// Seconds.
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(int64, tag = "3")]
    pub(super) db_size: i64,
    /// The member that leads, zero if there is none.
    #[prost(uint64, tag = "4")]
    pub(super) leader: u64,
    #[prost(string, repeated, tag = "8")]
    pub(super) errors: Vec<String>,
    #[prost(int64, tag = "9")]
    pub(super) db_size_in_use: i64,
    #[prost(bool, tag = "10")]
    pub(super) is_learner: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(uint64, tag = "2")]
    pub(super) member_id: u64,
}

impl Compare {
    const EQUAL: i32 = 0;
    const GREATER: i32 = 1;
    const LESS: i32 = 2;
    const VERSION: i32 = 0;
    const VALUE: i32 = 3;

    /// The key does not exist.
    pub(super) fn absent(key: &[u8]) -> Self {
        Self {
            result: Self::EQUAL,
            target: Self::VERSION,
            key: key.to_vec(),
            of: Some(Target::Version(0)),
        }
    }

    fn value(key: &[u8], result: i32, value: Vec<u8>) -> Self {
        Self {
            result,
            target: Self::VALUE,
            key: key.to_vec(),
            of: Some(Target::Value(value)),
        }
    }

    /// The key exists, with this value.
    pub(super) fn equal(key: &[u8], value: Vec<u8>) -> Self {
        Self::value(key, Self::EQUAL, value)
    }

    /// The key exists, and its value is larger in the order of bytes.
    pub(super) fn above(key: &[u8], value: Vec<u8>) -> Self {
        Self::value(key, Self::GREATER, value)
    }

    /// The key exists, and its value is smaller in the order of bytes.
    pub(super) fn below(key: &[u8], value: Vec<u8>) -> Self {
        Self::value(key, Self::LESS, value)
    }
}

impl RequestOp {
    pub(super) fn get(key: &[u8]) -> Self {
        let range = RangeRequest {
            key: key.to_vec(),
            ..RangeRequest::default()
        };
        Self {
            request: Some(Request::Range(range)),
        }
    }

    /// Writes a key, which is deleted when the etcd lease ends. Zero: never.
    pub(super) fn put(key: &[u8], value: Vec<u8>, lease: i64) -> Self {
        let key = key.to_vec();
        let put = PutRequest { key, value, lease };
        Self {
            request: Some(Request::Put(put)),
        }
    }
}

impl From<TxnRequest> for RequestOp {
    fn from(txn: TxnRequest) -> Self {
        Self {
            request: Some(Request::Txn(txn)),
        }
    }
}

impl ResponseOp {
    /// The only key of a range.
    pub(super) fn into_kv(self) -> Option<KeyValue> {
        match self.response {
            Some(Response::Range(range)) => range.kvs.into_iter().next(),
            _ => None,
        }
    }

    pub(super) fn into_txn(self) -> Option<TxnResponse> {
        match self.response {
            Some(Response::Txn(txn)) => Some(txn),
            _ => None,
        }
    }
}
