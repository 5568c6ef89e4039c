//! The execution of a script, with the conversions between Lua and the wire.

use std::{cell::RefCell, collections::HashMap, mem::swap, rc::Rc};

use mlua::{Function, Lua, MultiValue, Table, Value as LuaValue};
use redis::Value;

use super::keyspace::{Keyspace, error};

/// A change of a script: this text is replaced by the other one.
pub type Edit = (&'static str, &'static str);

/// The functions of a script, and the end of it: an error is a reply.
const PRELUDE: &str = "
local command, sha1hex = ...
redis = {pcall = command, sha1hex = sha1hex}
function redis.call(...)
  local reply = command(...)
  if type(reply) == 'table' and reply.err then
    error(reply)
  end
  return reply
end
function redis.error_reply(text) return {err = text} end
function redis.status_reply(text) return {ok = text} end
-- As in Redis, a script has no global variables of its own.
local function global(_, name)
  error('global variable ' .. tostring(name))
end
setmetatable(_G, {__index = global, __newindex = global})
return function(script)
  local ok, reply = pcall(script)
  if not ok and type(reply) ~= 'table' then
    return {err = 'ERR ' .. tostring(reply)}
  end
  return reply
end";

/// The number from which on Redis writes an exponent.
const LONG: i64 = 100_000_000_000_000_000;

struct Interpreter {
    lua: Lua,
    run: Function,
    keyspace: Rc<RefCell<Keyspace>>,
    scripts: HashMap<(usize, Option<Edit>), Function>,
}

thread_local! {
    static INTERPRETER: RefCell<Interpreter> =
        RefCell::new(Interpreter::new().expect("the prelude is valid"));
}

impl Keyspace {
    /// Executes a script.
    ///
    /// # Panics
    /// If the script does not compile.
    pub fn eval(
        &mut self,
        text: &'static str,
        edit: Option<Edit>,
        keys: &[&[u8]],
        args: &[&[u8]],
    ) -> Value {
        self.has_written = false;
        INTERPRETER.with_borrow_mut(|interpreter| {
            swap(self, &mut interpreter.keyspace.borrow_mut());
            let reply = interpreter.eval(text, edit, keys, args);
            swap(self, &mut interpreter.keyspace.borrow_mut());
            reply.unwrap_or_else(|failed| panic!("the script failed: {failed}"))
        })
    }
}

impl Interpreter {
    fn new() -> mlua::Result<Self> {
        let (lua, keyspace) = (Lua::new(), Rc::new(RefCell::new(Keyspace::default())));
        let shared = keyspace.clone();
        let format: Function = lua.load("return string.format").call(())?;
        let command = lua.create_function(move |lua, words: MultiValue| {
            let words = words.iter().map(|it| word(&format, it));
            let words: Vec<Vec<u8>> = words.collect::<mlua::Result<_>>()?;
            let reply = shared.borrow_mut().execute(&words);
            to_lua(lua, reply)
        })?;
        let sha1hex = lua.create_function(|_, text: mlua::String| {
            Ok(sha1_smol::Sha1::from(&*text.as_bytes())
                .digest()
                .to_string())
        })?;
        let run = lua.load(PRELUDE).call((command, sha1hex))?;
        let scripts = HashMap::new();
        Ok(Self {
            lua,
            run,
            keyspace,
            scripts,
        })
    }

    fn eval(
        &mut self,
        text: &'static str,
        edit: Option<Edit>,
        keys: &[&[u8]],
        args: &[&[u8]],
    ) -> mlua::Result<Value> {
        let script = match self.scripts.get(&(text.as_ptr() as usize, edit)) {
            Some(script) => script.clone(),
            None => {
                let edited = edit.map_or(text.to_owned(), |(from, to)| text.replace(from, to));
                let script = self.lua.load(edited).into_function()?;
                self.scripts
                    .insert((text.as_ptr() as usize, edit), script.clone());
                script
            }
        };
        for (name, words) in [("KEYS", keys), ("ARGV", args)] {
            let table = self.lua.create_table_with_capacity(words.len(), 0)?;
            for word in words {
                table.raw_push(self.lua.create_string(word)?)?;
            }
            self.lua.globals().raw_set(name, table)?;
        }
        from_lua(self.run.call(script)?)
    }
}

/// An argument of a command. `format` is that of Lua.
fn word(format: &Function, value: &LuaValue) -> mlua::Result<Vec<u8>> {
    match value {
        LuaValue::String(text) => Ok(text.as_bytes().to_vec()),
        LuaValue::Integer(number) if number.abs() < LONG => Ok(number.to_string().into_bytes()),
        LuaValue::Integer(_) | LuaValue::Number(_) => {
            let text: mlua::String = format.call(("%.17g", value))?;
            Ok(text.as_bytes().to_vec())
        }
        _ => Err(mlua::Error::runtime(
            "Lua redis lib command arguments must be strings or integers",
        )),
    }
}

fn to_lua(lua: &Lua, reply: Value) -> mlua::Result<LuaValue> {
    let named = |name: &str, text: String| -> mlua::Result<LuaValue> {
        let table = lua.create_table()?;
        table.raw_set(name, text)?;
        Ok(LuaValue::Table(table))
    };
    Ok(match reply {
        Value::Nil => LuaValue::Boolean(false),
        Value::Int(number) => LuaValue::Number(number as f64),
        Value::BulkString(text) => LuaValue::String(lua.create_string(text)?),
        Value::Okay => named("ok", "OK".to_owned())?,
        Value::SimpleString(text) => named("ok", text)?,
        Value::Array(items) => {
            let table = lua.create_table_with_capacity(items.len(), 0)?;
            for item in items {
                table.raw_push(to_lua(lua, item)?)?;
            }
            LuaValue::Table(table)
        }
        Value::ServerError(refused) => {
            let text = format!(
                "{} {}",
                refused.code(),
                refused.details().unwrap_or_default()
            );
            named("err", text)?
        }
        other => {
            return Err(mlua::Error::runtime(format!(
                "no reply of a command: {other:?}"
            )));
        }
    })
}

fn from_lua(value: LuaValue) -> mlua::Result<Value> {
    Ok(match value {
        LuaValue::String(text) => Value::BulkString(text.as_bytes().to_vec()),
        LuaValue::Integer(number) => Value::Int(number),
        LuaValue::Number(number) => Value::Int(number as i64),
        LuaValue::Boolean(true) => Value::Int(1),
        LuaValue::Table(table) => return from_table(&table),
        _ => Value::Nil,
    })
}

fn from_table(table: &Table) -> mlua::Result<Value> {
    if let LuaValue::String(text) = table.raw_get("err")? {
        return Ok(error(&text.to_string_lossy()));
    }
    if let LuaValue::String(text) = table.raw_get("ok")? {
        return Ok(Value::SimpleString(text.to_string_lossy()));
    }
    let mut items = Vec::new();
    for index in 1.. {
        match table.raw_get(index)? {
            LuaValue::Nil => break,
            item => items.push(from_lua(item)?),
        }
    }
    Ok(Value::Array(items))
}
