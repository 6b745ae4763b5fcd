// Search in pages opened from a folder: browsers refuse workers at file:// addresses, so the
// worker's script runs in a hidden frame that passes messages both ways, as late as a worker would.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const script = new URL(address, document.baseURI).href.replaceAll('"', "%22");
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.deliver = message => this.dispatch(this, window, message);
      this.frame.srcdoc =
        "<script>self.postMessage = message => frameElement.deliver(message);</" + "script>" +
        `<script src="${script}"></` + "script>";
      this.ready = new Promise(done => this.frame.addEventListener("load", done));
      document.body.append(this.frame);
    }

    dispatch(target, realm, message) {
      const event = new realm.MessageEvent("message", { data: structuredClone(message) });
      setTimeout(() => {
        target.onmessage?.(event);
        if (target === this) this.dispatchEvent(event);
      });
    }

    postMessage(message) {
      const copy = structuredClone(message);
      this.ready.then(() => {
        const inner = this.frame.contentWindow;
        if (inner) this.dispatch(inner, inner, copy);
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
