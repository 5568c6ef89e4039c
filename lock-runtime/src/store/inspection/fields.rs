//! The serialized form of holders and waiters (feature `serde`).

use serde::{Serializer, ser::SerializeMap as _};

use crate::{request::spec::Mode, store::Identity};

/// Writes `mode`, and for permits their number as `permits`.
pub(super) fn mode<S: Serializer>(mode: &Mode, serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("mode", mode.as_str())?;
    if let Mode::Permits(permits) = mode {
        map.serialize_entry("permits", permits)?;
    }
    map.end()
}

/// Writes `client`, the name, and `client_id`. Both are null for a foreign client.
pub(super) fn client<S: Serializer>(client: &Identity, serializer: S) -> Result<S::Ok, S::Error> {
    let id = match client {
        Identity::Client { id, .. } => Some(id.to_string()),
        Identity::Foreign => None,
    };
    let mut map = serializer.serialize_map(Some(2))?;
    map.serialize_entry("client", &client.name())?;
    map.serialize_entry("client_id", &id)?;
    map.end()
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU32, time::Duration};

    use serde_json::json;

    use super::*;
    use crate::store::{ClientId, Holder, HolderId, Inspection, Waiter};

    #[test]
    fn an_inspection_is_serialized_without_tokens() {
        let id: HolderId = "0123456789abcdef".parse().unwrap();
        let client = Identity::Client {
            id: ClientId::from_hex("00000000ff").unwrap(),
            name: Some("orders@web-3".into()),
        };
        let second = Duration::from_secs(1);
        let permits = Mode::Permits(NonZeroU32::new(3).unwrap());
        let state = Inspection {
            holders: vec![Holder::new(id, Mode::Exclusive, None, Identity::Foreign)],
            waiters: vec![Waiter::new(permits, second, second, client).waited(Some(2 * second))],
            fence: None,
            blocked_by: Vec::new(),
        };
        let expected = json!({
            "holders": [{
                "id": "0123456789abcdef", "mode": "exclusive", "ttl_ms": null, "client": null, "client_id": null,
                "held_for_ms": null, "is_reservation": false, "is_done": false,
            }],
            "waiters": [{
                "mode": "permits", "permits": 3, "lease_ms": 1000, "silent_ms": 1000, "client": "orders@web-3",
                "client_id": "00000000ff", "waited_ms": 2000,
            }],
            "fence": null, "blocked_by": [],
        });
        assert_eq!(serde_json::to_value(&state).unwrap(), expected);
    }
}
