//! What a Redis server sends, and the URLs that name one.

use std::sync::{Arc, Mutex};

use redis::{Parser, PushInfo, PushKind, Value};

use super::{
    connection::{
        handshake::{self, Greeting, Info, Kind},
        pushes::Pushes,
    },
    error,
    operator::{acl::AclLine, health::Examined, listing::Scanned, rights},
    script::reply::Reply,
    settings::RedisOptions,
    topology::redlock,
    url::{self, SERVER, sentinel},
};
use crate::{
    fuzz::{SECRET, is_readable, refused_readably, with_password, within_bounds},
    observe::health::ServerHealth,
    shell::sync::lock,
    store::{Listener, StoreError, StoreEvent},
};

/// The values in the bytes that a connection has received, as the redis crate decodes them: not
/// within the bounds of a parser, as it reserves 4,096 elements for each array, of which a hundred
/// are nested at most (30 MB).
pub(super) fn values(mut received: &[u8]) -> Vec<Value> {
    let (mut parser, mut values) = (Parser::new(), Vec::new());
    loop {
        match parser.parse_value(&mut received) {
            Ok(value) => values.push(value),
            Err(error) => {
                let acl = AclLine::new("lock", 0);
                is_readable(&error::disconnected(&error, &acl));
                is_readable(&error::unconnected(&error, true, &acl));
                return values;
            }
        }
    }
}

/// Reads a reply as the operations do.
fn read(mut reply: Reply) -> Result<(), StoreError> {
    match reply.word() {
        "granted" => {
            reply.count()?;
            reply.grant()?;
        }
        "refused" => {
            reply.count()?;
            reply.text()?;
            reply.number()?;
        }
        "holders" => {
            let count = reply.count()?;
            for holder in reply.holders(count)? {
                assert_eq!(holder.id.to_string().parse().ok(), Some(holder.id));
                is_readable(&holder.client);
            }
            reply.waiters()?;
        }
        _ => drop(reply.texts()),
    }
    Ok(())
}

#[test]
fn replies() {
    bolero::check!().for_each(|input: &[u8]| {
        let values = values(input);
        within_bounds(input, || {
            let (acl, pushes) = (AclLine::new("lock", 0), Pushes::new("lock"));
            for value in &values {
                error::ends_connection(value);
                rights::missing(value, &acl, "lock");
                refused_readably(handshake::text(value, &acl));
                refused_readably(handshake::micros_of(value, &acl));
                refused_readably(Scanned::parse(value.clone()));
                if let Value::Push { kind, data } = value.clone() {
                    pushes.take(&PushInfo { kind, data }, None);
                }
                refused_readably(Reply::new(value.clone()).and_then(read));
            }
            let mut values = values.into_iter();
            let greeting = Greeting::of([(); 4].map(|()| values.next().unwrap_or(Value::Nil)));
            refused_readably(greeting.info(&acl));
            refused_readably(greeting.check_format("lock", &acl));
            refused_readably(greeting.micros(&acl));
            if let Some((_, _, theirs)) = refused_readably(greeting.marker(&acl)) {
                is_readable(&error::other_settings("lock", &theirs, "ours"));
            }
        });
    });
}

#[derive(Default)]
struct Heard(Mutex<Vec<StoreEvent>>);

impl Listener for Heard {
    fn on_event(&self, event: &StoreEvent) {
        lock(&self.0).push(event.clone());
    }
}

/// The first word is the channel, and the rest the message.
#[test]
fn messages() {
    bolero::check!().for_each(|input: &[u8]| {
        let split = input.iter().position(|byte| *byte == b'\n');
        let (channel, message) = input.split_at(split.unwrap_or(0));
        let data = [channel, message.strip_prefix(b"\n").unwrap_or(message)];
        let message = PushInfo {
            kind: PushKind::Message,
            data: data.map(|it| Value::BulkString(it.to_vec())).into(),
        };
        let heard = Arc::new(Heard::default());
        let listener: Arc<dyn Listener> = heard.clone();
        let mut pushes = Pushes::sharded("lock");
        pushes.own = "lock:own".into();
        pushes.listeners.add(Arc::downgrade(&listener));
        within_bounds(input, || pushes.take(&message, None));
        assert!(lock(&heard.0).len() <= 4096, "the notices of one message");
    });
}

/// The lines of a server about itself.
#[test]
fn info() {
    bolero::check!().for_each(|input: &[u8]| {
        let info = Info(String::from_utf8_lossy(input).into_owned());
        within_bounds(input, || {
            for (kind, fails_over) in [(Kind::Primary, true), (Kind::Node, false)] {
                refused_readably(info.check(kind));
                let mut examined = Examined {
                    server: ServerHealth::new("a"),
                    findings: Vec::new(),
                    slots: None,
                };
                examined.judge_info(&info, (kind, fails_over), Some(1));
                is_readable(&examined.server);
                examined.findings.iter().for_each(is_readable);
            }
            info.uptime();
        });
    });
}

#[test]
fn urls() {
    bolero::check!().for_each(|input: &[u8]| {
        let Some(url) = with_password("", input) else {
            return;
        };
        within_bounds(input, || {
            let mut shown = String::new();
            let options = RedisOptions::default;
            let is_redlock = url.to_ascii_lowercase().starts_with("redlock:");
            let urls = is_redlock.then(|| redlock::urls_of(&url));
            let mut each = match urls.and_then(refused_readably) {
                Some(urls) => urls,
                None => vec![&*url],
            };
            each.truncate(9);
            for url in each {
                let server = SERVER.endpoint(url, &options());
                let nodes = url::cluster(url, &options());
                let primary = sentinel::open(url, options()).map(|it| it.0.to_string());
                shown += &format!("{server:?} {nodes:?} {primary:?}");
                let (server, primary) = (refused_readably(server), refused_readably(primary));
                server.iter().for_each(is_readable);
                primary.iter().for_each(is_readable);
                refused_readably(nodes);
            }
            assert!(!shown.contains(SECRET), "{url:?}: {shown}");
        });
    });
}
